"""Codes without a fixed size: constants, cells and levels, plans against brute force, chunks with what they measure."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core import entropy_coder as coder
from aatc_cli.core.stepped_codec import SteppedCodec
from aatc_cli.core.stepped_plan import allocate_steps, lower_hull
from aatc_cli.core.stepped_tables import (
    BITS,
    DEAD,
    ERROR,
    MODELS,
    MOST,
    OUTSIDE,
    SYMBOLS,
    TOTAL,
    WIDEST,
    levels,
    likelihoods,
    most,
    normal_bits,
    normal_error,
    plain_bits,
    step,
)
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import LayerCells, StoredLayer
from aatc_cli.core.stored_rate import OVER, RateControl
from aatc_cli.core.stored_stream import LayerStream, unpacked_streams
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_options import Units
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from tests.core.test_stored_chunk import CHANNELS, DIM, HEADS, LAYERS, by_hand, chunk_of, maps_of

RULE = TileRule((32, 16, 16))


def test_constants_are_what_the_cells_give() -> None:
    for width in range(WIDEST + 1):
        assert normal_error(width) == pytest.approx(ERROR[width], rel=1e-9)
        assert normal_bits(width) == pytest.approx(BITS[width], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("width", [1, 3, 6, 9, 12])
def test_error_and_bits_are_those_of_normal_numbers(width: int) -> None:
    z = torch.randn(1, 400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(width)).T
    one = torch.ones(1, dtype=torch.float64)
    eye = torch.eye(1, dtype=torch.float64)[None]
    codec = SteppedCodec(eye, eye, one, torch.tensor([width]), one, "lloyd")
    codes, _ = codec.quantize(z)
    gain = 1 / (1 - 0.5 * ERROR[width])
    assert float((codec.dequantize(codes, torch.zeros(1)) / gain - z).square().mean()) == pytest.approx(
        ERROR[width], rel=0.02
    )
    counts = torch.bincount(codes.abs().flatten()).double()
    signs = float((codes != 0).double().mean())
    shares = counts[counts > 0] / counts.sum()
    assert float(-(shares * shares.log2()).sum()) + signs == pytest.approx(BITS[width], rel=0.02)


@pytest.mark.parametrize("width", [1, 8, 9, 12, WIDEST])
def test_levels_lie_in_their_cells(width: int) -> None:
    found = levels(width)[1:] * (1 - 0.5 * ERROR[width])
    j = np.arange(1, most(width) + 1)
    assert ((j - 1 + DEAD) * step(width) <= found).all()
    assert (found <= (j + DEAD) * step(width)).all()


def test_likelihoods_are_whole_shares_that_nothing_lacks() -> None:
    for width, model in itertools.product((1, 5, 10, WIDEST), range(MODELS)):
        found = likelihoods(width, model)
        assert found.shape == (SYMBOLS,)
        assert found.min() >= 0
        assert found[OUTSIDE] >= 1
        assert found.sum() == TOTAL


def test_loud_latents_saturate_and_stay_finite() -> None:
    one = torch.ones(1)
    codec = SteppedCodec(one.view(1, 1, 1), one.view(1, 1, 1), one, torch.tensor([2]), one, "lloyd")
    codes, _ = codec.quantize(torch.tensor([[1e30], [-1e30], [0.0]]))
    assert codes.flatten().tolist() == [most(2), -most(2), 0]
    assert most(2) >> plain_bits(2) > MOST
    assert torch.isfinite(codec.dequantize(codes, one)).all()


def test_steps_are_the_best_that_a_budget_buys() -> None:
    """Against every choice on the hull, for channels of two parts that pay for 32 and 16 tokens."""
    curve, bits = np.array([1.0, 0.8, 0.45, 0.2, 0.05]), np.array([0.0, 0.3, 0.5, 1.25, 2.0])
    hull = lower_hull(bits, curve)
    assert hull.tolist() == [0, 2, 3, 4]
    pool = [
        Units(np.array([[3.0, 0.7], [1.1, 0.2]]), np.array([32, 16])),
        Units(np.array([[2.2, 0.4]]), np.array([16])),
    ]
    energy = np.concatenate([units.energy.ravel() for units in pool])
    tokens = np.concatenate([np.repeat(units.tokens, 2) for units in pool])

    def left(choice: np.ndarray) -> float:
        return float((tokens * energy * curve[choice]).sum())

    for budget in (0.0, 20.0, 57.0, 110.0, 1000.0):
        widths, level = allocate_steps(pool, budget, curve, bits)
        found = np.concatenate([part.ravel() for part in widths])
        spent = float((tokens * bits[found]).sum())
        assert spent <= budget
        every = [
            np.array(choice)
            for choice in itertools.product(hull.tolist(), repeat=6)
            if (tokens * bits[list(choice)]).sum() <= spent
        ]
        assert left(found) == pytest.approx(min(map(left, every)))
        assert (level > 0) == (budget < 1000.0)


def code_of(depth: int, within: str, seed: int = 3, rank: int = 0) -> StoredCode:
    generator = torch.Generator().manual_seed(seed)

    def site() -> TileCodec:
        encode = torch.randn(HEADS, DIM, DIM, generator=generator) / 3 + 2 * torch.eye(DIM)
        bits = torch.randint(0, WIDEST + 1, (RULE.classes, CHANNELS), generator=generator)
        bits[torch.rand(bits.shape, generator=generator) < 0.4] = 0
        bits[0, :DIM] = 0
        ones = torch.ones(CHANNELS)
        variance = torch.rand(CHANNELS, generator=generator) + 0.5
        codec = SteppedCodec(encode, torch.linalg.inv(encode), ones, bits[0], variance, "lloyd")
        return TileCodec(codec, bits, RULE)

    layers = [
        StoredLayer({side: site() for side in SIDES}, maps_of(layer, depth, within, rank, generator), RULE)
        for layer in range(LAYERS)
    ]
    return StoredCode(layers, HEADS)


def text_of(code: StoredCode, tokens: int, loudness: float, seed: int = 4) -> tuple[list, list]:
    """Rows whose residuals are about as large as their code expects, times ``loudness``."""
    rows, classes = chunk_of(RULE, tokens, seed)
    return [loudness * layer / 6 for layer in rows], classes


@pytest.mark.parametrize("loudness", [1.0, 6.0, 0.1])
def test_chunks_decode_to_what_encoding_held(loudness: float) -> None:
    """Unit by unit and token by token, by hand, where nothing is made louder."""
    code = code_of(2, "units")
    rows, classes = text_of(code, 128, loudness)
    below: list[torch.Tensor] = []
    expected = by_hand(code, rows, classes)
    for layer, packing, mine, told, hand in zip(code.layers, code.packings, rows, classes, expected, strict=True):
        codes, decoded = layer.encode(mine, below, told)
        assert isinstance(packing, LayerStream)
        [(read, again)] = unpacked_streams([packing], [packing.pack(codes, told)], 128)
        assert torch.equal(read.cells, codes.cells)
        assert torch.equal(again, told)
        assert torch.equal(layer.decode(read, below, again), decoded)
        torch.testing.assert_close(decoded[::11], hand[::11], rtol=1e-3, atol=1e-3 * loudness)
        below = [decoded, *below][:2]


@pytest.mark.parametrize("loudness", [1.0, 9.0, 1e-3, 1e6, 1e30])
def test_no_chunk_exceeds_its_plan(loudness: float) -> None:
    """By two hundredths of one layer at most, here of four; and text that has something to say takes what it may."""
    code = code_of(2, "units")
    control = RateControl(code.layers, HEADS)
    for seed in range(3):
        rows, classes = text_of(code, 192, loudness, seed)
        # one layer of a text may be as loud as none before it
        rows[2] = rows[2] * 5
        planned = [3 * bits / 8 for bits in control.planned]
        parts = code.parts(rows, classes)
        taken, allowed = np.cumsum([len(part) for part in parts]), np.cumsum(planned)
        assert (taken <= allowed + np.array([0.1, OVER, OVER, OVER]) * planned).all()
        assert taken[-1] <= 1.006 * allowed[-1]
        if loudness >= 1:
            assert taken[-1] > 0.93 * allowed[-1]
        found, again = code.decode(code.encode(rows, classes))
        assert all(torch.equal(a, b) for a, b in zip(again, classes, strict=True))
        assert all(bool(torch.isfinite(layer).all()) for layer in found)


def test_what_is_measured_is_what_is_written() -> None:
    code = code_of(1, "units")
    rows, classes = text_of(code, 256, 1.0)
    control = RateControl(code.layers, HEADS, 128)
    below: list[torch.Tensor] = []
    for place, stream in enumerate(code.packings):
        codes, decoded = control.encode(place, rows[place], below, classes[place])
        bits = stream.bits(codes, classes[place], 128)
        for chunk, expected in enumerate(bits.tolist()):
            span, tiles = slice(128 * chunk, 128 * (chunk + 1)), slice(2 * chunk, 2 * chunk + 2)
            part = LayerCells(codes.cells[span], codes.loudness[tiles])
            written = 8 * len(stream.pack(part, classes[place][:, span]))
            assert written == pytest.approx(expected, abs=8 * 32)
            assert written <= expected + 16 * 8
        below = [decoded]
    assert control.bits.shape == (2,)


def test_streams_are_read_as_they_were_written() -> None:
    generator = np.random.default_rng(0)
    for count in (0, 1, 15, 16, 1000):
        rows = np.sort(generator.integers(1, 1 + WIDEST * MODELS, count)).astype(np.int32)
        symbols = np.array([generator.choice(np.flatnonzero(has)) for has in coder.has_share()[rows]], dtype=np.uint8)
        [found] = coder.decoded([coder.encoded(symbols, rows)], [rows])
        assert np.array_equal(found, symbols)


def test_a_stream_is_as_long_as_its_symbols_are_unlikely() -> None:
    generator = np.random.default_rng(1)
    for width in (1, 3, 9):
        shares = likelihoods(width, MODELS // 2)
        symbols = generator.choice(SYMBOLS, 20_000, p=shares / TOTAL).astype(np.uint8)
        rows = np.full(symbols.size, coder.table_row(width, MODELS // 2), dtype=np.int32)
        bits = float(np.log2(TOTAL / shares[symbols]).sum())
        assert 8 * len(coder.encoded(symbols, rows)) == pytest.approx(bits + 8 * coder.STATE_BYTES / 2, abs=128)


def test_bytes_that_are_no_chunk_are_refused() -> None:
    code = code_of(1, "none")
    data = code.encode(*text_of(code, 64, 1.0))
    for wrong in (data[:-4], data + b"\0" * 4, data[:4] + b"\1" * 4 + data[8:], data[:-2] + b"\x17\x2a"):
        with pytest.raises(AatcError):
            code.decode(wrong)
