"""Widths of tiles: planes bought where a byte serves best, over the channels of all classes at one level.

A unit is one head group of one class of tokens of a site: E channels with energies e_c, what losing them costs in
nats per position for its share of the tokens. A unit takes p_2 planes of sixteen two-bit digits and p_1 of one-bit
digits, and what it is left with is the least of

    sum_c e_c D(2 a_c + o_c)   over   sum_c a_c <= 16 p_2,   sum_c o_c <= 16 p_1,   o_c in {0, 1}.

At a price of a digit the channels that gain most from an odd width are odd; then digits of two bits are bought in
falling order of what they save, which is exact. Options of every unit around what water-filling would give it form a
convex hull, and steps along all hulls are bought in falling order of what a byte saves. Everything is float64 on the
host, with total orders and sums in a fixed order, so that a plan is a function of its inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.tile_bytes import DIGITS, plane_bits
from aatc_cli.errors import AatcError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# options around the planes of water-filling, more and fewer of either size
_TWOS = (-1, 0, 1)
_ONES = (-1, 0, 1, 2)
# of a digit of two bits, in levels, at which it is tried which channels are odd
_PRICES = (1.0, 2.0, 4.0)
# the level is found again from the plan it gives, until options stay
_ROUNDS = 4
# of the level of bits that are bought one by one, tried beside those that were found where none of them stays
_AROUND = (0.125, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Units:
    """Units alike in size. energy [U, E] of one token each; tokens [U]: of a tile in the unit's class."""

    energy: Floats
    tokens: Ints


@dataclass(frozen=True)
class _Options:
    """What units may be given. widths [U, O, E]; bits [U, O] of a token, with its scale; errors [U, O]."""

    widths: Ints
    bits: Ints
    errors: Floats


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
    options = [_options(units, level, curve, scale_bits) for units in pool]
    chosen, reached = _buy(pool, options, budget, follow=follow)
    found = [
        np.take_along_axis(part.widths, pick[:, None, None], 1)[:, 0]
        for part, pick in zip(options, chosen, strict=True)
    ]
    return found, reached


def _left(pool: Sequence[Units], widths: Sequence[Ints], curve: Floats) -> float:
    """What widths [U, E] of every part leave of all units, in nats."""
    return math.fsum(
        float(left) for units, bits in zip(pool, widths, strict=True) for left in _sums(units.energy * curve[bits])
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


def _options(units: Units, level: float, curve: Floats, scale_bits: int) -> _Options:
    """Widths of all units for numbers of planes around those of water-filling at ``level``."""
    errors = units.energy[:, :, None] * curve
    plain = (errors[:, :, :-1] - errors[:, :, 1:] > level).sum(2)
    twos, ones = (plain // 2).sum(1) // DIGITS, (plain % 2).sum(1) // DIGITS
    size = units.energy.shape[1]
    ranks = [_ranks(_gain_of_odd(errors, price * level)) for price in _PRICES]
    # one choice more is nothing at all
    choices = [(two, one) for two in _TWOS for one in _ONES]
    widths = np.zeros((len(plain), len(choices) + 1, size), dtype=np.int64)
    left = np.empty((len(plain), len(choices) + 1))
    bits = np.zeros((len(plain), len(choices) + 1), dtype=np.int64)
    for place, (two, one) in enumerate(choices):
        planes_of_two = np.clip(twos + two, 0, -(-size * ((curve.size - 1) // 2) // DIGITS))
        planes_of_one = np.clip(ones + one, 0, -(-size // DIGITS))
        left[:, place] = np.inf
        for rank in ranks:
            found, error = _filled(errors, rank, planes_of_two, planes_of_one)
            better = error < left[:, place]
            widths[better, place], left[better, place] = found[better], error[better]
        bits[:, place] = plane_bits(planes_of_two, planes_of_one)
    left[:, -1] = _sums(errors[:, :, 0])
    bits += scale_bits * (bits > 0)
    return _Options(widths, bits, left)


def _gain_of_odd(errors: Floats, price: float) -> Floats:
    """What a digit of one bit saves every channel [U, E] where digits of two bits cost ``price``."""
    best = []
    for first in (0, 1):
        found = errors[:, :, first]
        for digits, place in enumerate(range(first + 2, errors.shape[2], 2), start=1):
            found = np.minimum(found, errors[:, :, place] + digits * price)
        best.append(found)
    return best[0] - best[1]


def _ranks(gain: Floats) -> Ints:
    """Place of every channel [U, E] by falling gain, ties to the lower channel."""
    order = np.argsort(-gain, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(gain.shape[1]), order.shape), 1)
    return ranks


def _filled(errors: Floats, rank: Ints, twos: Ints, ones: Ints) -> tuple[Ints, Floats]:
    """Best widths [U, E] in so many planes, and what they leave [U]; channels of least ``rank`` [U, E] are odd."""
    units, size, _ = errors.shape
    even, odd = errors[:, :, 0::2], errors[:, :, 1::2]
    chosen = rank < DIGITS * ones[:, None]
    even_steps = even[:, :, :-1] - even[:, :, 1:]
    odd_steps = np.zeros_like(even_steps)
    odd_steps[:, :, : odd.shape[2] - 1] = odd[:, :, :-1] - odd[:, :, 1:]
    steps = np.where(chosen[:, :, None], odd_steps, even_steps).reshape(units, -1)
    falling = np.argsort(-steps, axis=1, kind="stable")
    taken = np.zeros(steps.shape, dtype=bool)
    bought = (np.arange(steps.shape[1]) < DIGITS * twos[:, None]) & (np.take_along_axis(steps, falling, 1) > 0)
    np.put_along_axis(taken, falling, bought, 1)
    widths = 2 * taken.reshape(units, size, -1).sum(2) + chosen
    left = _sums(np.take_along_axis(errors, widths[:, :, None], 2)[:, :, 0])
    return widths, left


def _sums(parts: Floats) -> Floats:
    """Sums over the last dimension, one number after another: no machine adds in another order."""
    sums: Floats = np.cumsum(parts, axis=-1)[..., -1]
    return sums


def _buy(pool: Sequence[Units], options: Sequence[_Options], budget: int, *, follow: bool) -> tuple[list[Ints], float]:
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


def _steps(pool: Sequence[Units], options: Sequence[_Options]) -> list[_Step]:
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
