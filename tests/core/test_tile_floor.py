"""A floor under the lowest class: kept, paid within the budget, and at no more loss than it must cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from aatc_cli.core.tile_allocate import allocate_planes, spent_bits
from aatc_cli.core.tile_floor import allocate_floored
from aatc_cli.core.tile_options import Ints, Units
from aatc_cli.errors import AatcError

CURVE = np.array([1.0, 0.36, 0.12, 0.035, 0.0095, 0.0025, 0.00065, 0.00017, 0.00004])
BUDGET = 40_000
SCALE = 8


@pytest.fixture
def pool() -> list[Units]:
    """Twelve units of 64 channels on either side, half of them of a lowest class whose tokens count for little."""
    random = np.random.default_rng(3)
    parts = []
    for _ in range(2):
        energy = np.exp(random.normal(size=(12, 64)) - np.linspace(0, 4, 64)) * np.tile([[0.02], [1.0]], (6, 1))
        parts.append(Units(energy, np.tile([32, 32], 6)))
    return parts


LOWEST = [np.tile([True, False], 6)] * 2


def loss(pool: Sequence[Units], widths: Sequence[Ints]) -> float:
    return float(sum((u.tokens @ (u.energy * CURVE[w]).sum(1)) for u, w in zip(pool, widths, strict=True)))


def bits_of(pool: Sequence[Units], widths: Sequence[Ints], *, lowest: bool) -> int:
    parts = [Units(u.energy[m == lowest], u.tokens[m == lowest]) for u, m in zip(pool, LOWEST, strict=True)]
    return spent_bits(parts, [w[m == lowest] for w, m in zip(widths, LOWEST, strict=True)], SCALE)


def floored(pool: Sequence[Units], least: int, budget: int = BUDGET) -> list[Ints]:
    return allocate_floored(pool, LOWEST, least, SCALE, partial(allocate_planes, **settings(budget)))[0]


def settings(budget: int) -> dict[str, object]:
    return {"budget": budget, "curve": CURVE, "scale_bits": SCALE}


def test_a_floor_is_kept_within_the_budget(pool: list[Units]) -> None:
    free, _ = allocate_planes(pool, BUDGET, CURVE, SCALE)
    before = bits_of(pool, free, lowest=True)
    for least in (before // 2, before, 2 * before + 500, BUDGET // 2):
        widths = floored(pool, least)
        found = bits_of(pool, widths, lowest=True)
        assert found >= least
        assert found + bits_of(pool, widths, lowest=False) <= BUDGET
        if least <= before:
            assert all(np.array_equal(a, b) for a, b in zip(widths, free, strict=True))


def test_a_floor_costs_no_more_than_two_budgets_of_their_own(pool: list[Units]) -> None:
    """The floor bought for the lowest class alone and the rest for the others is a plan too: not a better one.

    Up to a plane of a unit, 32 tokens by 32 bits, which either may leave unspent.
    """
    least = BUDGET // 3
    ours = floored(pool, least)
    apart = [np.zeros_like(w) for w in ours]
    for lowest, budget in ((True, least + 1024), (False, BUDGET - least - 1024)):
        parts = [Units(u.energy[m == lowest], u.tokens[m == lowest]) for u, m in zip(pool, LOWEST, strict=True)]
        for whole, found, mask in zip(apart, allocate_planes(parts, budget, CURVE, SCALE)[0], LOWEST, strict=True):
            whole[mask == lowest] = found
    assert bits_of(pool, apart, lowest=True) >= least
    assert loss(pool, ours) <= loss(pool, apart)


def test_a_floor_above_the_budget_is_refused(pool: list[Units]) -> None:
    with pytest.raises(AatcError, match="does not pay for the floor"):
        floored(pool, BUDGET + 1)
