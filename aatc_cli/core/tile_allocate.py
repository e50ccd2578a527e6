"""Widths of tiles: planes bought where a byte serves best, over the channels of all classes at one level.

A unit is one head group of one class of tokens of a site: E channels with energies e_c, what losing them costs in
nats per position for its share of the tokens. Its options around what water-filling would give it (`core.tile_options`)
form a convex hull, and steps along all hulls are bought in falling order of what a byte saves. Everything is float64 on
the host, with total orders and sums in a fixed order, so that a plan is a function of its inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aatc_cli.core.tile_bytes import DIGITS, plane_bits
from aatc_cli.core.tile_options import Floats, Ints, Options, Units, options_of, sums_in_order
from aatc_cli.errors import AatcError

# the level is found again from the plan it gives, until options stay
_ROUNDS = 4
# of the level of bits that are bought one by one, tried beside those that were found where none of them stays
_AROUND = (0.125, 0.25, 0.5, 1.0, 2.0)


def allocate_planes(
    pool: Sequence[Units], budget: int, curve: Floats, scale_bits: int, *, follow: bool = False
) -> tuple[list[Ints], float]:
    """Widths [U, E] of every part of the pool within ``budget`` bits of a tile; the level, in nats for a bit.

    curve [max + 1]: error of a channel of energy 1 at 0, 1, ... bits, convex and falling. A unit that codes anything
    pays ``scale_bits`` a token. follow: a unit of the second part is coded only where the one in its place in the first
    is; keys without a bit read as zero, and queries that look away from their tokens would look at them.
    Raises `AatcError` for a budget below zero.
    """
    if budget < 0:
        raise AatcError(
            f"the budget does not pay for the classes of a tile: {-budget} bits are missing", "raise the budget"
        )
    start = level = _level(pool, budget, curve)
    widths: list[Ints] = []
    tried: list[tuple[float, list[Ints], float]] = []
    for _ in range(_ROUNDS):
        found, reached = _bought(pool, level, budget, curve, scale_bits, follow=follow)
        if widths and all(np.array_equal(a, b) for a, b in zip(found, widths, strict=True)):
            return found, level
        tried.append((_left(pool, found, curve), found, level))
        if reached <= 0:
            break
        widths, level = found, reached
    # few large units: the step that did not fit can say a level whose options all fit and leave much of the budget
    for factor in _AROUND:
        found, _ = _bought(pool, factor * start, budget, curve, scale_bits, follow=follow)
        tried.append((_left(pool, found, curve), found, factor * start))
    _, widths, level = min(reversed(tried), key=lambda one: one[0])
    return widths, level


def _bought(
    pool: Sequence[Units], level: float, budget: int, curve: Floats, scale_bits: int, *, follow: bool
) -> tuple[list[Ints], float]:
    """Widths [U, E] of every part from options around ``level``, and the level that their steps reach."""
    options = [options_of(units, level, curve, scale_bits) for units in pool]
    chosen, reached = _buy(pool, options, budget, follow=follow)
    found = [
        np.take_along_axis(part.widths, pick[:, None, None], 1)[:, 0]
        for part, pick in zip(options, chosen, strict=True)
    ]
    return found, reached


def _left(pool: Sequence[Units], widths: Sequence[Ints], curve: Floats) -> float:
    """What widths [U, E] of every part leave of all units, in nats."""
    return math.fsum(
        float(left)
        for units, bits in zip(pool, widths, strict=True)
        for left in sums_in_order(units.energy * curve[bits])
    )


def spent_bits(pool: Sequence[Units], widths: Sequence[Ints], scale_bits: int) -> int:
    """Bits of a tile that widths [U, E] take, planes and scales."""
    total = 0
    for units, bits in zip(pool, widths, strict=True):
        planes = plane_bits(-(-(bits // 2).sum(1) // DIGITS), -(-(bits % 2).sum(1) // DIGITS))
        total += int(units.tokens @ (planes + scale_bits * bits.any(1)))
    return total


def _level(pool: Sequence[Units], budget: int, curve: Floats) -> float:
    """What the last bit saves when bits are bought one by one, without planes or scales."""
    steps = curve[:-1] - curve[1:]
    gains = np.concatenate([(units.energy[:, :, None] * steps).ravel() for units in pool])
    paid = np.concatenate([np.repeat(units.tokens, units.energy.shape[1] * steps.size) for units in pool])
    order = np.argsort(-gains, kind="stable")
    place = int(np.searchsorted(np.cumsum(paid[order]), budget))
    return float(gains[order[min(place, order.size - 1)]])


def _buy(pool: Sequence[Units], options: Sequence[Options], budget: int, *, follow: bool) -> tuple[list[Ints], float]:
    """The option of every unit, and what the first step that did not fit would have saved for a bit; 0 if all did.

    Steps go along the lower hulls of error over bits; one that does not fit ends its unit's way and smaller ones of
    others are still taken. With ``follow`` steps of the second part wait for their unit of the first.
    """
    steps = _steps(pool, options)
    # every way begins with nothing, the last of the options
    chosen = [np.full(len(units.tokens), option.bits.shape[1] - 1) for units, option in zip(pool, options, strict=True)]
    waiting: dict[int, list[_Step]] = {}
    level = 0.0
    for step in steps:
        if follow and step.part == 1 and not options[0].bits[step.unit, chosen[0][step.unit]]:
            waiting.setdefault(step.unit, []).append(step)
            continue
        for one in (step, *(waiting.pop(step.unit, ()) if step.part == 0 and step.cost <= budget else ())):
            if one.cost <= budget and chosen[one.part][one.unit] == one.before:
                chosen[one.part][one.unit], budget = one.after, budget - one.cost
            elif not level:
                level = one.saved
    return chosen, level


class _Step(NamedTuple):
    """From one option of a unit to the next: what it saves for a bit, and its bits of a tile."""

    saved: float
    part: int
    unit: int
    before: int
    after: int
    cost: int


def _steps(pool: Sequence[Units], options: Sequence[Options]) -> list[_Step]:
    """All steps by what they save, ties to the part and the unit that stand first."""
    found = []
    for part, (units, option) in enumerate(zip(pool, options, strict=True)):
        for unit in range(len(units.tokens)):
            for before, after in pairwise(_hull(option.bits[unit], option.errors[unit])):
                more = int(option.bits[unit, after] - option.bits[unit, before])
                saved = float(option.errors[unit, before] - option.errors[unit, after]) / more
                found.append(_Step(saved, part, unit, before, after, int(units.tokens[unit]) * more))
    return sorted(found, key=lambda step: (-step.saved, *step[1:]))


def _hull(bits: Ints, errors: Floats) -> list[int]:
    """Options on the lower convex hull of error over bits, from the cheapest on, errors falling."""
    path: list[int] = []
    # of options without bits the last, which is nothing at all
    for place in sorted(range(bits.size), key=lambda i: (int(bits[i]), float(errors[i]), -i)):
        if path and (bits[place] == bits[path[-1]] or errors[place] >= errors[path[-1]]):
            continue
        while len(path) > 1:
            a, b = path[-2], path[-1]
            flatter = (errors[a] - errors[b]) * (bits[place] - bits[b]) <= (errors[b] - errors[place]) * (
                bits[b] - bits[a]
            )
            if not flatter:
                break
            path.pop()
        path.append(place)
    return path
