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
    TOTAL,
    WIDEST,
    levels,
    likelihoods,
    most,
    normal_bits,
    normal_error,
    step,
)
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.tile_allocate import Units
from aatc_cli.core.tile_codec import TileCodec
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
        assert found.shape == (2 * MOST + 2,)
        assert found.min() >= 1
        assert found.sum() == TOTAL


def test_loud_latents_saturate_and_stay_finite() -> None:
    one = torch.ones(1)
    codec = SteppedCodec(one.view(1, 1, 1), one.view(1, 1, 1), one, torch.tensor([2]), one, "lloyd")
    codes, _ = codec.quantize(torch.tensor([[1e30], [-1e30], [0.0]]))
    assert codes.flatten().tolist() == [MOST, -MOST, 0]
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


def code_of(depth: int, within: str, seed: int = 3) -> StoredCode:
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
        StoredLayer({side: site() for side in SIDES}, maps_of(layer, depth, within, 0, generator), RULE)
        for layer in range(LAYERS)
    ]
    return StoredCode(layers, HEADS)


@pytest.mark.parametrize("loudness", [1.0, 6.0, 0.1])
def test_chunks_decode_to_what_encoding_held_and_take_what_was_measured(loudness: float) -> None:
    pytest.importorskip("constriction")
    code = code_of(2, "units")
    rows, classes = chunk_of(RULE, 128)
    rows = [loudness * layer for layer in rows]
    data = code.encode(rows, classes)
    found, again = code.decode(data)
    assert all(torch.equal(a, b) for a, b in zip(again, classes, strict=True))
    for mine, expected in zip(found, by_hand(code, rows, classes), strict=True):
        torch.testing.assert_close(mine[::11], expected[::11], rtol=1e-3, atol=1e-3 * loudness)
    below, bits = [], 0.0
    for layer, packing, mine, told in zip(code.layers, code.packings, rows, classes, strict=True):
        codes, decoded = layer.encode(mine, below, told)
        bits += packing.bits(codes, 128)
        below = [decoded, *below][:2]
    assert 8 * len(data) == pytest.approx(bits, rel=0.01)


def test_bytes_that_are_no_chunk_are_refused() -> None:
    pytest.importorskip("constriction")
    code = code_of(1, "none")
    data = code.encode(*chunk_of(RULE, 64))
    for wrong in (data[:-4], data + b"\0" * 4, data[:4] + b"\1" * 4 + data[8:]):
        with pytest.raises(AatcError):
            code.decode(wrong)


def test_without_the_coder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def absent(name: str, *args: object, **kwargs: object) -> object:
        if name == "constriction":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    coder._model.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(AatcError, match="constriction"):
        code_of(1, "none").encode(*chunk_of(RULE, 64))
