"""KVarN against its definition, one tile of one head at a time in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.core.balanced import BalancedMinMax
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.errors import AatcError
from aatc_cli.profiles import load_recipe

TILE, DIM, HEADS = 64, 16, 2
GEOMETRY = Geometry(layers=3, heads=4, kv_heads=HEADS, head_dim=DIM, hidden_size=64)


def vectors() -> torch.Tensor:
    """Two whole tiles and a rest; a loud channel and a few loud tokens."""
    x = torch.randn(1, 2 * TILE + 5, HEADS * DIM, generator=torch.Generator().manual_seed(3))
    x[..., 3] *= 20
    x[:, 40:43] *= 8
    return x


def spread(matrix: np.ndarray, axis: int) -> np.ndarray:
    return matrix.std(axis=axis, ddof=1, keepdims=True)


def imbalance(matrix: np.ndarray) -> float:
    return sum(float(s.max() / max(s.min(), 1e-8)) for s in (spread(matrix, 0), spread(matrix, 1)))


def written_out(matrix: np.ndarray, bits: int) -> np.ndarray:
    """A tile [rows, columns]: scales in turns, the best of 16 rounds, then rows between their extremes."""
    log_column, log_row = np.zeros((1, matrix.shape[1])), np.zeros((matrix.shape[0], 1))
    best = (imbalance(matrix), np.ones_like(log_column), np.ones_like(log_row))
    for _ in range(16):
        current = matrix / np.exp(log_column) / np.exp(log_row)
        log_column = np.clip(log_column + np.log(np.clip(spread(current, 0), 1e-3, 1e3)), -0.3, 10)
        current = matrix / np.exp(log_column) / np.exp(log_row)
        log_row = np.clip(log_row + np.log(np.clip(spread(current, 1), 1e-3, 1e3)), -0.3, 10)
        found = imbalance(matrix / np.exp(log_column) / np.exp(log_row))
        if found <= best[0]:
            best = (found, np.exp(log_column), np.exp(log_row))
    _, column, row = best
    out = np.zeros_like(matrix)
    for place in range(matrix.shape[0]):
        line = matrix[place] / column[0] / row[place]
        step = (line.max() - line.min()) / (2**bits - 1)
        codes = np.clip(np.round((line - line.min()) / step), 0, 2**bits - 1)
        scale, low = np.float16(row[place, 0] * step), np.float16(row[place, 0] * line.min())
        out[place] = (codes * float(scale) + float(low)) * np.float16(column[0]).astype(float)
    return out


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_tile_as_written_out(side: str, bits: int) -> None:
    x = vectors().double()
    found = BalancedMinMax(side, bits, TILE, DIM).reconstruct(x)
    assert torch.equal(found[:, 2 * TILE :], x[:, 2 * TILE :])
    for first in (0, TILE):
        for head in range(HEADS):
            block = x[0, first : first + TILE, head * DIM : (head + 1) * DIM].numpy()
            expected = written_out(block.T, bits).T if side == "k" else written_out(block, bits)
            got = found[0, first : first + TILE, head * DIM : (head + 1) * DIM].numpy()
            assert np.abs(got - expected).max() < 1e-9 * np.abs(block).max()


def test_loud_channels_and_tokens_cost_less_than_in_groups() -> None:
    x = vectors()
    whole = x[:, : 2 * TILE]

    def error(codec: object) -> float:
        return float((codec.reconstruct(x)[:, : 2 * TILE] - whole).norm() / whole.norm())  # type: ignore[attr-defined]

    bits = torch.full((HEADS * DIM,), 4)
    assert error(BalancedMinMax("k", 4, TILE, DIM)) < 0.8 * error(GroupedMinMax(bits, TILE, "channel"))


def test_tokens_that_are_all_the_same_come_back() -> None:
    x = torch.full((1, TILE, DIM), 0.37)
    for side in ("k", "v"):
        assert torch.allclose(BalancedMinMax(side, 2, TILE, DIM).reconstruct(x), x, rtol=2e-3)
        assert torch.equal(BalancedMinMax(side, 2, TILE, DIM).reconstruct(torch.zeros_like(x)), torch.zeros_like(x))


def test_bytes_by_hand() -> None:
    channels = HEADS * DIM
    bits = [{"k": [4] * channels, "v": [2] * channels}] * 3
    law = load_recipe("kvarn-k4v2").choices.layout(GEOMETRY, HeadGroups.both(HEADS), [bits])
    found = law.breakdown(4 + 128 + 2 * TILE)
    # of a head's tile of keys 16 steps and minima and 64 scales, of values 64 and 16; 2 tiles, 2 heads, 3 layers
    assert found["key_scales"] == 2 * 2 * 3 * (2 * 16 + 64) * 2
    assert found["value_scales"] == 2 * 2 * 3 * (2 * 64 + 16) * 2
    assert (found["codes_keys"], found["codes_values"]) == (3 * 2 * TILE * channels // 2, 3 * 2 * TILE * channels // 4)
    assert law.static_breakdown() == {}


def test_the_released_widths() -> None:
    recipe = load_recipe("kvarn-k4v2")
    flat = SiteEnergy(np.ones(32), np.ones(32))

    def widths(budget: float) -> dict[str, set[int]]:
        found = recipe.choices.allocator.allocate(
            recipe.choices, [{"k": flat, "v": flat}], budget, HeadGroups.both(HEADS), None
        )
        return {side: set(found.bits[0][side].tolist()) for side in ("k", "v")}

    assert widths(3) == {"k": {4}, "v": {2}}
    assert widths(2) == {"k": {3}, "v": {1}}
    for budget in (1, 8):
        with pytest.raises(AatcError, match=f"at a budget of {budget}"):
            widths(budget)
    with pytest.raises(ValueError, match="three widths in a row"):
        type(recipe).model_validate(recipe.model_dump() | {"min_bits": 0})
