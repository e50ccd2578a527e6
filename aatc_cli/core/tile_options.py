"""What a unit of a tile may be given: planes around those of water-filling, and the channels' widths in them.

A unit takes p_2 planes of sixteen two-bit digits and p_1 of one-bit digits, and what it is left with is the least of

    sum_c e_c D(2 a_c + o_c)   over   sum_c a_c <= 16 p_2,   sum_c o_c <= 16 p_1,   o_c in {0, 1}.

At a price of a digit the channels that gain most from an odd width are odd; then digits of two bits are bought in
falling order of what they save, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.tile_bytes import DIGITS, plane_bits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# options around the planes of water-filling, more and fewer of either size
_TWOS = (-1, 0, 1)
_ONES = (-1, 0, 1, 2)
# of a digit of two bits, in levels, at which it is tried which channels are odd
_PRICES = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Units:
    """Units alike in size. energy [U, E] of one token each; tokens [U]: of a tile in the unit's class."""

    energy: Floats
    tokens: Ints


@dataclass(frozen=True)
class Options:
    """What units may be given. widths [U, O, E]; bits [U, O] of a token, with its scale; errors [U, O]."""

    widths: Ints
    bits: Ints
    errors: Floats


def options_of(units: Units, level: float, curve: Floats, scale_bits: int) -> Options:
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
    left[:, -1] = sums_in_order(errors[:, :, 0])
    bits += scale_bits * (bits > 0)
    return Options(widths, bits, left)


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
    left = sums_in_order(np.take_along_axis(errors, widths[:, :, None], 2)[:, :, 0])
    return widths, left


def sums_in_order(parts: Floats) -> Floats:
    """Sums over the last dimension, one number after another: no machine adds in another order."""
    sums: Floats = np.cumsum(parts, axis=-1)[..., -1]
    return sums
