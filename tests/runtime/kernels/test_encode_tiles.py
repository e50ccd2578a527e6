"""Tiles that a kernel packs, emulated on a CPU: the bytes that the packing by torch gives."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.runtime.fused_tiles import encode
from aatc_cli.runtime.fused_tiles.encode import EncodeTables, FusedTileLayer
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.sources import Sources
from aatc_cli.runtime.kernels import launch
from aatc_cli.runtime.kernels.encode_tiles import EncodeCall
from aatc_cli.runtime.kernels.parts import parts_of
from aatc_cli.runtime.tiles.layer import TileLayer

RULE = TileRule((32, 16, 16))
PRELUDE = """
static float __uint_as_float(u32 v) { return as_float(v); }
static u32 __float_as_uint(float v) { return as_bits(v); }
static int __popc(u32 v) { return __builtin_popcount(v); }
// of a third number that is so large that sums are whole
static float __fmaf_rd(float a, float b, float c) { return (float)(__builtin_floor((double)a * b) + c); }
"""
GIVEN = ", ".join([*(f"n[{i}]" for i in range(7)), *(f"a[{i}]" for i in range(14))])
ENTRY = """
struct Any { void* p; template <class T> operator T*() const { return (T*)p; } };
static const int* n; static Any a[14];
static void call() { encode_tiles(GIVEN); }
extern "C" void run(int x, int y, const int* numbers, void** given) {
  n = numbers;
  for (int i = 0; i < 14; i++) a[i].p = given[i];
  run_grid(x, y, 1, call);
}
"""


def codecs_of(dim: int, heads: int, quantizer: str, rule: TileRule = RULE) -> dict[Any, TileCodec]:
    found = {}
    for place, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(place)
        matrix = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64))[0]
        variance = 0.2 + torch.rand(heads * dim, generator=generator, dtype=torch.float64)
        widths = torch.randint(0, 5, (rule.classes, heads * dim), generator=generator)
        widths = (widths + 2 * torch.arange(rule.classes)[:, None] - 1).clamp(0, 8)
        codec = TransformCodec(
            matrix,
            matrix.mT.contiguous(),
            variance,
            widths[0],
            variance,
            quantizer,  # type: ignore[arg-type]
            weight=0.5 + torch.rand(heads * dim, generator=generator, dtype=torch.float64),
            scale_bits=8,
            restored=0.5,
            centre=0.1 * torch.randn(heads * dim, generator=generator, dtype=torch.float64) if place else None,
        )
        found[side] = TileCodec(codec, widths, rule).to("cpu", torch.float32)
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[EncodeCall, Tensor], Tensor]:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler of C++")
    folder, libraries = tmp_path_factory.mktemp("encode"), dict[int, Any]()
    text = (Path(launch.__file__).parent / "encode_tiles.cu").read_text()
    text = text.replace('#include "device.cuh"', PRELUDE).replace("extern __shared__ __align__(128) u8 smem[];", "")
    source = (Path(__file__).parent / "emulated.h").read_text() + text + ENTRY.replace("GIVEN", GIVEN)

    def run(call: EncodeCall, out: Tensor) -> Tensor:
        dim, heads = call.keys.shape[3], call.keys.shape[2]
        if dim not in libraries:
            (folder / f"{dim}.cpp").write_text(source)
            command = [
                "g++",
                "-std=c++17",
                "-O1",
                "-w",
                "-ffp-contract=off",
                "-shared",
                "-fPIC",
                f"-DE={dim}",
                "-DNW=8",
            ]
            subprocess.run([*command, "-o", folder / f"{dim}.so", folder / f"{dim}.cpp"], check=True)
            libraries[dim] = ctypes.CDLL(str(folder / f"{dim}.so"))
        numbers = (ctypes.c_int * 7)(*(int(n) for n in call.numbers()))
        tensors = call.arguments(out)
        libraries[dim].run(out.shape[0], heads, numbers, (ctypes.c_void_p * 14)(*(t.data_ptr() for t in tensors)))
        return out

    return run


@pytest.mark.parametrize("quantizer", ["lloyd", "uniform"])
@pytest.mark.parametrize(("dim", "heads", "order"), [(64, 2, "head"), (80, 1, "layer")])
def test_tiles_by_the_kernel_are_those_of_torch(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, dim: int, heads: int, order: Any, quantizer: str
) -> None:
    rule = replace(RULE, order=order)
    codecs = codecs_of(dim, heads, quantizer, rule)
    held = RecordTiles(codecs, rule, heads)
    given: Any = (0, codecs, {"k": None, "v": None}, rule, heads, held)
    layers = TileLayer(*given), FusedTileLayer(*given).by_kernel(EncodeTables.of(held))
    monkeypatch.setattr(encode, "TileEncoder", lambda size, device: emulated)
    generator = torch.Generator().manual_seed(5)
    rows: Any = {side: torch.randn(1, 128, heads * dim, generator=generator) for side in SIDES}
    # a token of nothing, a loud one, and many that received the same
    rows["k"][0, 3], rows["v"][0, 70] = 0.0, 1e18
    received = torch.rand(1, rule.orders(heads), 128, generator=generator).mul(8).round()
    expected, found = (layer.encode(rows, received, 0) for layer in layers)
    assert torch.equal(expected, found)


def test_the_kernel_reads_any_order_of_codes() -> None:
    """Every bit of a tile is found again; a table that is not so is refused by a check of its own."""
    codecs = codecs_of(64, 2, "lloyd")
    held = RecordTiles(codecs, RULE, 2)
    sources = Sources.of(held)
    assert int(sources.counts.sum()) == held.nbytes // 4
    tables = EncodeTables.of(held)
    # no cell has two thresholds, and thresholds of a width are counted once
    assert int(tables.before.max()) == 2 ** (int(max(codec.bits.max() for codec in codecs.values())) - 1) - 2


def test_a_matrix_is_the_sum_of_its_parts() -> None:
    matrix = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    parts = parts_of(matrix)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().flip(0).sum(0), matrix.double())
