"""SQuat against its definition, written out token by token with a least-squares solver."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.stats import LayerStats
from aatc_cli.methods.quantizers.squat import LAMBDA, PROMPT, Squat, directions
from aatc_cli.methods.sites import Site
from aatc_cli.profiles import load_recipe

GEOMETRY = Geometry(layers=1, heads=4, kv_heads=2, head_dim=16, hidden_size=32)
TOKENS, GROUP = 70, 32
RECIPE = load_recipe("squat")


class Table:
    """The one tensor that the codec reads."""

    path = Path("transform")

    def __init__(self, queries: torch.Tensor) -> None:
        self.queries = queries

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        assert name == "layers.0.k.queries"
        assert tuple(self.queries.shape) == shape
        return self.queries.numpy()

    numbers = floats

    def damaged(self, reason: str) -> Exception:
        return ValueError(reason)


@pytest.fixture(scope="module")
def stats() -> LayerStats:
    """Queries that look in few directions, far stronger than keys are."""
    generator = torch.Generator().manual_seed(1)
    found = LayerStats.empty(GEOMETRY, 8, torch.zeros(2, 16, 16))
    few, mix = torch.randn(2, 500, 3, generator=generator), torch.randn(2, 3, 16, generator=generator)
    queries = few.double() @ mix.double() * 4
    found.q_outer += queries.mT @ queries
    found.count = 500
    return found


@pytest.fixture(scope="module")
def table(stats: LayerStats) -> torch.Tensor:
    assert Squat().tables("v", stats, lambda: torch.zeros(0), 1) == {}
    return Squat().tables("k", stats, lambda: torch.zeros(0), 1)["queries"]


def keys() -> torch.Tensor:
    return torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(2))


def codec(table: torch.Tensor, side: str, bits: int):
    return RECIPE.choices.allocator.codec(RECIPE.choices, Site(Table(table), 0, side, GEOMETRY, 1, [bits] * 32))


def min_max(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of one channel of one group of tokens between their extremes, in float16 steps."""
    low, scale = np.float16(values.min()), np.float16((values.max() - values.min()) / (2**bits - 1))
    return np.float64(low) + np.float64(scale) * np.clip(np.round((values - np.float64(low)) / scale), 0, 2**bits - 1)


def written_out(rows: np.ndarray, queries: np.ndarray, bits: int) -> np.ndarray:
    """Keys [T, D] of one head: channels 0 .. 7, then 8 .. 15 at the place where the whole error is least seen."""
    tokens, dim = rows.shape
    half, out, moved = dim // 2, np.zeros_like(rows), rows.copy()
    seen = np.vstack([np.eye(dim), np.sqrt(LAMBDA) * queries])
    for first in range(0, tokens, GROUP):
        span = range(first, first + GROUP)
        for channel in range(half):
            out[span, channel] = min_max(rows[span, channel], bits)
        for token in span:
            error = out[token, :half] - rows[token, :half]
            rest = np.linalg.lstsq(seen[:, half:], -seen[:, :half] @ error, rcond=None)[0]
            moved[token, half:] = rows[token, half:] + rest
        for channel in range(half, dim):
            out[span, channel] = min_max(moved[span, channel], bits)
    return out


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_keys_as_written_out(table: torch.Tensor, bits: int) -> None:
    x = keys()
    found = codec(table, "k", bits).reconstruct(x)
    assert found.dtype == x.dtype
    assert torch.equal(found[:, 64:], x[:, 64:])
    for head in range(2):
        span = slice(16 * head, 16 * head + 16)
        expected = written_out(x[0, :64, span].double().numpy(), table[head].numpy(), bits)
        got = found[0, :64, span].double().numpy()
        # a code that lies midway in the one arithmetic may go the other way in the other: none does here
        assert np.abs(got - expected).max() < 2e-3
        assert np.abs(got[:, 8:] - x[0, :64, span][:, 8:].double().numpy()).max() > 0.1 / bits


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_queries_see_less_of_the_error_than_of_kivis(table: torch.Tensor, stats: LayerStats, bits: int) -> None:
    x = keys()
    plain = GroupedMinMax(torch.full((32,), bits), GROUP, "channel").reconstruct(x)
    ours = codec(table, "k", bits).reconstruct(x)

    def seen(y: torch.Tensor) -> float:
        error = (y - x)[0, :64].double().unflatten(-1, (2, 16))
        return float(torch.einsum("thd,hde,the->", error, stats.q_outer / stats.count, error))

    assert 0 < seen(ours) < seen(plain)
    # without queries nothing moves
    assert torch.equal(codec(torch.zeros_like(table), "k", bits).reconstruct(x), plain)


def test_values_are_kivis(table: torch.Tensor) -> None:
    x = keys()
    assert torch.equal(codec(table, "v", 2).reconstruct(x), GroupedMinMax(torch.full((32,), 2), GROUP).reconstruct(x))


def test_the_table_is_the_root_of_the_queries_moment(table: torch.Tensor, stats: LayerStats) -> None:
    assert directions(128) == 60
    assert table.shape == (2, directions(16), 16)
    # three directions are all there are, of the eight that are kept
    moment = stats.q_outer / stats.count * PROMPT
    assert torch.allclose(table.mT @ table, moment, rtol=1e-9, atol=1e-9 * float(moment.abs().max()))


def test_bytes_are_kivis_and_the_queries() -> None:
    bits = [{side: [2] * 32 for side in ("k", "v")}]
    ours, kivi = (load_recipe(name).choices.layout(GEOMETRY, HeadGroups.both(1), [bits]) for name in ("squat", "kivi"))
    assert ours.breakdown(1000) == kivi.breakdown(1000)
    assert ours.static_breakdown() == {"queries": 2 * 2 * directions(16) * 16}
