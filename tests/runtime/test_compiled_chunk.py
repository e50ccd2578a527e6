"""Chunks in machine code and products of bfloat16: the bytes of the other way, near the same rows, within the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.core import entropy_coder as coder
from aatc_cli.core.layer_products import LayerProducts
from aatc_cli.core.stored_layer import LayerCells
from aatc_cli.core.stored_rate import RateControl
from aatc_cli.core.stored_stream import LayerStream
from aatc_cli.errors import AatcError
from tests.core.test_stepped import HEADS, code_of, text_of

pytest.importorskip("numba")

CASES = [(2, "units", 0), (1, "none", 0), (2, "values", 5), (0, "units", 0)]


def compiled(code):
    from aatc_cli.runtime.stored.compiled_chunk import CompiledChunk

    return CompiledChunk(code.layers, HEADS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_product_decodes_what_units_do_one_after_another(case) -> None:
    """In float64, where nothing is rounded: y = [below, h] M."""
    code = code_of(*case[:2], rank=case[2])
    rows, classes = text_of(code, 64, 1.0)
    below: list[torch.Tensor] = []
    for place, layer in enumerate(code.layers):
        codes, decoded = layer.encode(rows[place], below, classes[place])
        products = LayerProducts(layer)
        latents = torch.zeros(64, 2 * layer.channels)
        for unit, unit_code in zip(layer.units, layer.codes, strict=True):
            told = classes[place][unit.group]
            loud = torch.ones(64)
            h = unit_code.dequantize(codes.cells[:, unit.columns], told, loud)
            latents[:, unit.columns] = h / unit_code.sigma
        found = products.decode([each.bfloat16() for each in below], latents[:, products.columns])
        error = float((found.float() - decoded).square().mean() / decoded.square().mean())
        assert error < 1e-4
        below = [decoded, *below][:2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_either_reader_reads_what_either_writer_wrote(case) -> None:
    code = code_of(*case[:2], rank=case[2])
    quick = compiled(code)
    rows, classes = text_of(code, 128, 1.3)
    planned = sum(2 * bits / 8 for bits in RateControl(code.layers, HEADS).planned)
    for parts in (quick.parts(rows, classes), code.parts(rows, classes)):
        assert sum(map(len, parts)) <= 1.005 * planned
        found, told = quick.read(parts, 128)
        other, again = code.read(parts, 128)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(told, again, classes, strict=True))
        for mine, theirs, exact in zip(found, other, rows, strict=True):
            left = float((theirs - exact).square().mean())
            assert float((mine - theirs).square().mean()) < 0.01 * left + 1e-4 * float(exact.square().mean())


def test_bytes_are_those_of_the_stream() -> None:
    """Of the same cells, wherever they come from."""
    code = code_of(2, "units")
    rows, classes = text_of(code, 128, 2.0)
    below: list[torch.Tensor] = []
    for place, layer in enumerate(compiled(code).layers):
        targets = layer.targets(rows[place], below)
        cells, read, bits, models = layer.code(targets, classes[place], 17)
        whole = torch.zeros(128, 2 * layer.layer.channels, dtype=torch.int32)
        whole[:, layer.products.columns] = torch.from_numpy(cells.astype(np.int32))
        codes = LayerCells(whole, torch.full((2,), 17))
        stream = LayerStream(layer.layer, HEADS)
        assert layer.pack(cells, models, classes[place], 17) == stream.pack(codes, classes[place])
        assert bits == pytest.approx(float(stream.bits(codes, classes[place], 128)[0]))
        below = [layer.products.decode(below, read), *below][:2]


def test_a_stream_that_was_changed_is_refused() -> None:
    code = code_of(1, "units")
    quick = compiled(code)
    rows, classes = text_of(code, 64, 1.0)
    parts = quick.parts(rows, classes)
    for place in range(len(parts)):
        for cut in (parts[place][:-2], parts[place] + b"\1\0", parts[place][:-1] + bytes([parts[place][-1] ^ 64])):
            with pytest.raises(AatcError):
                quick.read([*parts[:place], cut, *parts[place + 1 :]], 64)


def test_vectors_beyond_floats_are_refused() -> None:
    code = code_of(1, "units")
    rows, classes = text_of(code, 64, 1.0)
    rows[1] = rows[1] * 3e38
    with pytest.raises(AatcError, match="too large"):
        compiled(code).parts(rows, classes)


@pytest.mark.parametrize("loudness", [1e-3, 50.0, 1e20])
def test_chunks_of_any_loudness_take_the_bytes_of_their_plan(loudness: float) -> None:
    code = code_of(2, "units")
    rows, classes = text_of(code, 128, loudness)
    planned = sum(2 * bits / 8 for bits in RateControl(code.layers, HEADS).planned)
    parts = compiled(code).parts(rows, classes)
    assert sum(map(len, parts)) <= 1.006 * planned
    found, _ = compiled(code).read(parts, 128)
    assert all(bool(torch.isfinite(layer).all()) for layer in found)


def test_loops_have_the_constants_of_the_coder() -> None:
    from aatc_cli.runtime.kernels import cell_symbols as loops

    for name in ("LANES", "WORD", "LOW", "TOTAL_BITS", "SYMBOL_BITS"):
        assert getattr(loops, name) == getattr(coder, name)
