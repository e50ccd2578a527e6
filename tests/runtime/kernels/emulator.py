"""The kernel of tiles with classes on a CPU: its own source, with what is CUDA's replaced by ``emulated.h``."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from aatc_cli.runtime.kernels import launch
from aatc_cli.runtime.kernels.decode_tiles import TileCall, TileScratch
from aatc_cli.runtime.kernels.tile_shape import TileShape

_SOURCES = Path(launch.__file__).parent
_REPLACED = {"device.cuh", "wgmma_whole.cuh", "transfer_sm90.cuh"}
_NUMBERS, _TENSORS = 12, 27
_GIVEN = ", ".join([*(f"n[{i}]" for i in range(_NUMBERS)), "f", *(f"a[{i}]" for i in range(_TENSORS))])
_ENTRY = f"""
struct Any {{ void* p; template <class T> operator T*() const {{ return (T*)p; }} }};
static const int* n; static float f; static Any a[{_TENSORS}];
static void call() {{ attend_tiles({_GIVEN}); }}
extern "C" void run(int x, int y, int z, const int* numbers, float scaling, void** given) {{
  n = numbers; f = scaling;
  for (int i = 0; i < {_TENSORS}; i++) a[i].p = given[i];
  run_grid(x, y, z, call);
}}
extern "C" int barriers_written_over() {{ return written_over; }}
"""


def source() -> str:
    """The kernel as C++, for one warpgroup of fibers."""

    def header(match: re.Match[str]) -> str:
        return "" if match[1] in _REPLACED else (_SOURCES / match[1]).read_text()

    text = re.sub(r'^#include "(.+)"$', header, (_SOURCES / "tiles_sm90.cu").read_text(), flags=re.MULTILINE)
    text = text.replace("extern __shared__ __align__(128) u8 smem[];", "").replace("__shared__", "static")
    return (Path(__file__).parent / "emulated.h").read_text() + text + _ENTRY


def compiled(shape: TileShape, folder: Path) -> ctypes.CDLL:
    """The kernel for tensors of float32, as a library in ``folder``."""
    defines = [f"-D{name}={value}" for name, value in shape.defines(2)]
    text = source()
    name = folder / f"tiles-{hashlib.sha256(repr((text, defines)).encode()).hexdigest()[:16]}"
    if not name.with_suffix(".so").exists():
        name.with_suffix(".cpp").write_text(text)
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defines, "-o", f"{name}.so", f"{name}.cpp"]
        subprocess.run(command, check=True)
    return ctypes.CDLL(f"{name}.so")


def attend(folder: Path, shape: TileShape, chunk: int, call: TileCall) -> Tensor:
    """What the kernel gives: [B, Hq, D]."""
    query = call.query
    parts = shape.parts(chunk)
    assert shape.shared_bytes(parts) <= 232_448
    scratch = TileScratch.of(shape, parts, query.device)
    scratch.part.fill_(torch.nan)
    out = torch.full_like(query, torch.nan)
    tensors = call.arguments(scratch, out)
    assert len(tensors) == _TENSORS
    assert all(tensor.is_contiguous() for tensor in tensors)
    *whole, scaling = shape.numbers(chunk)
    numbers = (ctypes.c_int * _NUMBERS)(*(int(value) for value in whole))
    pointers = (ctypes.c_void_p * _TENSORS)(*(tensor.data_ptr() for tensor in tensors))
    grid = (shape.batch, shape.kv_heads, parts)
    library = compiled(shape, folder)
    library.run(*grid, numbers, ctypes.c_float(float(scaling)), pointers)
    # on a GPU what a barrier was may come back later, where others write to its memory before the program ends
    assert not library.barriers_written_over()
    assert not scratch.arrivals.any()
    return out
