"""Block-GTQ against its definition: energies of pairs, bits by brute force, groups as norm and direction."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.core.rate_groups import RateGroups, rotation_of, sphere_levels
from aatc_cli.core.stats import LayerStats
from aatc_cli.methods.quantizers.rate_groups import RateGrouped
from aatc_cli.profiles import load_recipe

GEOMETRY = Geometry(layers=1, heads=6, kv_heads=2, head_dim=8, hidden_size=48)
RECIPE = load_recipe("block-gtq")


class Tables:
    """The tensors that the allocator reads."""

    path = Path("transform")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = self.tensors[name.removeprefix("layers.0.k.")]
        assert tuple(found.shape) == shape
        return found.double().numpy()


def stats() -> tuple[LayerStats, torch.Tensor, torch.Tensor]:
    """Stats of tokens, with the queries [N, 6, 8] and the keys [N, 16] that they are of."""
    generator = torch.Generator().manual_seed(5)
    loud = torch.tensor([1.0, 4.0, 0.3, 2.0, 1.5, 0.1, 0.7, 3.0])
    queries = torch.randn(50, 6, 8, generator=generator).double() * loud
    keys = torch.randn(50, 16, generator=generator).double() * loud.flip(0).repeat(2)
    found = LayerStats.empty(GEOMETRY, 8, torch.zeros(2, 8, 8))
    found.update(queries, keys, keys, torch.arange(8))
    return found, queries, keys


def energies() -> tuple[list[np.ndarray], np.ndarray]:
    """As the allocator reads them, and from the tokens themselves: [H, D / 2]."""
    found, queries, keys = stats()
    read = RECIPE.choices.allocator.read(RECIPE.choices, Tables(RateGrouped().tables("k", found, None, 1)), GEOMETRY)
    expected = np.zeros((2, 4))
    for head, pair in itertools.product(range(2), range(4)):
        places = [pair, pair + 4]
        of_queries = np.mean([float((queries[:, 3 * head + g][:, places] ** 2).sum(1).mean()) for g in range(3)])
        of_keys = float((keys[:, 8 * head :][:, places] ** 2).sum(1).mean())
        expected[head, pair] = (of_queries + of_keys) / 2
    return read, expected


def test_energies_are_of_one_query_head_and_the_keys() -> None:
    read, expected = energies()
    assert np.allclose(read[0], expected, rtol=1e-12)
    assert RateGrouped().tables("v", stats()[0], None, 1) == {}


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_widths_are_the_best_of_all(bits: int) -> None:
    read, expected = energies()
    flat = SiteEnergy(np.ones(16), np.ones(16))
    found = RECIPE.choices.allocator.allocate(
        RECIPE.choices, [{"k": flat, "v": flat}], bits, HeadGroups.both(1), read
    ).bits[0]
    assert found["v"].tolist() == [bits] * 16
    for head in range(2):
        mine = found["k"][8 * head : 8 * head + 8]
        assert np.array_equal(mine[:4], mine[4:])
        left = {
            widths: sum(s * 4.0**-b for s, b in zip(expected[head], widths, strict=True))
            for widths in itertools.product(range(1, 9), repeat=4)
            if sum(widths) <= 4 * bits
        }
        assert left[tuple(mine[:4].tolist())] == pytest.approx(min(left.values()), rel=1e-12)


def test_a_group_as_written_out() -> None:
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bits = torch.tensor([3, 1, 1, 3, 3, 1, 1, 3] + [2] * 8)
    found = RateGroups(bits, 8).reconstruct(x)
    for group, width in (([0, 3, 4, 7], 3), ([1, 2, 5, 6], 1), (list(range(8, 16)), 2)):
        turn, levels = rotation_of(len(group)).numpy(), sphere_levels(len(group), width)
        assert np.allclose(turn @ turn.T, np.eye(len(group)), atol=1e-12)
        for token in range(7):
            row = x[0, token, group].numpy()
            norm = float(np.float16(np.linalg.norm(row)))
            codes = [min(range(len(levels)), key=lambda c, u=u: abs(levels[c] - u)) for u in turn @ row / norm]
            expected = turn.T @ levels[codes] * norm
            assert np.allclose(found[0, token, group].numpy(), expected, atol=1e-9)


def test_levels_are_best_for_points_on_a_sphere() -> None:
    """Uniform in three dimensions, where a coordinate is; of least error where samples are coded."""
    assert np.allclose(sphere_levels(3, 2), [-0.75, -0.25, 0.25, 0.75], atol=1e-3)
    assert np.array_equal(sphere_levels(1, 2), [-1, -1, 1, 1])
    points = np.random.default_rng(0).normal(size=(200_000, 6))
    unit = (points / np.linalg.norm(points, axis=1, keepdims=True)).ravel()

    def error(levels: np.ndarray) -> float:
        nearest = np.abs(unit[:60_000, None] - levels).min(1)
        return float((nearest**2).mean())

    best = sphere_levels(6, 2)
    assert all(error(best) < error(best * factor) for factor in (0.93, 1.07))


def test_bytes_by_hand() -> None:
    widths = [3, 1, 1, 3, 3, 1, 1, 3] + [2] * 8
    law = RECIPE.choices.layout(GEOMETRY, HeadGroups.both(1), [[{"k": widths, "v": [2] * 16}]])
    found = law.breakdown(4 + 128 + 16)
    # keys have two groups and one, values one and one: 5 norms a token
    assert found["norms"] == 16 * 5 * 2
    assert found["codes_keys"] == 16 * sum(widths) // 8
