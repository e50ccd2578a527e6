"""Tokens, scales and latents of one tile on a CPU, in machine code made by numba.

Names: k class, r row (tokens of a tile by class), t token, j channel with bits.
"""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import numpy as np
from numba import njit

TILE = 64
_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
_ONE, _TWO, _THREE = np.uint32(1), np.uint32(2), np.uint32(3)
# places of no sign: one that may be negative is looked at before every load
_U = np.uint64
_ONE_U = np.uint64(1)


@njit(**_OPTIONS)
def rows_of(data, base, bits, quotas, row):
    """The row of every token of a tile whose classes lie at ``base``: rows lie by class, those of a class by token.

    Whether every class has as many tokens as its quota says.
    """
    place = np.zeros(quotas.shape[0], dtype=np.int64)
    for k in range(1, quotas.shape[0]):
        place[k] = place[k - 1] + quotas[k - 1]
    for t in range(TILE):
        k = 0
        for bit in range(bits):
            k |= ((data[base + bit * (TILE // 8) + t // 8] >> (t % 8)) & 1) << bit
        if k >= quotas.shape[0]:
            return False
        row[t] = place[k]
        place[k] += 1
    stop = 0
    for k in range(quotas.shape[0]):
        stop += quotas[k]
        if place[k] != stop:
            return False
    return True


@njit(**_OPTIONS)
def scales_of(data, place, bits, scales, count, out, first):
    """The scales of a part that lie at ``place``, as numbers in ``out`` from ``first`` on."""
    for r in range(count):
        if bits == 8:
            out[first + r] = scales[data[place + r]]
        elif bits == 16:
            out[first + r] = scales[np.int64(data[place + 2 * r]) | (np.int64(data[place + 2 * r + 1]) << 8)]
        else:
            out[first + r] = scales[(data[place + r // 2] >> (4 * (r % 2))) & 15]


@njit(**_OPTIONS)
def latents_of(words, halves, tile, entries, slots, levels, first, count, quota, codes, out):
    """Latents [count, TILE] of one part before the token scale; ``tile``: its byte in the data."""
    for j in range(count):
        entry = 4 * (first + j)
        s, level, to = 4 * entries[entry + 1], _U(entries[entry + 3]), _U(TILE * j)
        number = entries[entry + 2]
        at, bit = _U((tile + slots[s]) // 4), np.uint32(slots[s + 1])
        if number == 1 and slots[s + 3] == 2:
            l0, l1, l2, l3 = levels[level], levels[level + _ONE_U], levels[level + _U(2)], levels[level + _U(3)]
            for r in range(_U(quota)):
                digit = words[at + r] >> bit
                odd, even = (l3 if digit & _TWO else l1), (l2 if digit & _TWO else l0)
                out[to + r] = odd if digit & _ONE else even
            continue
        half = _U((tile + slots[s]) // 2)
        if number == 1:
            l0, l1 = levels[level], levels[level + _ONE_U]
            for r in range(_U(quota)):
                out[to + r] = l1 if (np.uint32(halves[half + r]) >> bit) & _ONE else l0
            continue
        again, more, up = _U((tile + slots[s + 4]) // 4), np.uint32(slots[s + 5]), np.uint32(slots[s + 6])
        if number == 2 and slots[s + 3] == 2:
            for r in range(_U(quota)):
                code = ((words[at + r] >> bit) & _THREE) | (((words[again + r] >> more) & _THREE) << up)
                out[to + r] = levels[level + _U(code)]
            continue
        if number == 2:
            l0, l1, l2, l3 = levels[level], levels[level + _ONE_U], levels[level + _U(2)], levels[level + _U(3)]
            l4, l5, l6, l7 = levels[level + _U(4)], levels[level + _U(5)], levels[level + _U(6)], levels[level + _U(7)]
            for r in range(_U(quota)):
                low, high = (np.uint32(halves[half + r]) >> bit) & _ONE, words[again + r] >> more
                a, b = (l1 if low else l0), (l3 if low else l2)
                c, d = (l5 if low else l4), (l7 if low else l6)
                upper, lower = (d if high & _ONE else c), (b if high & _ONE else a)
                out[to + r] = upper if high & _TWO else lower
            continue
        for r in range(_U(quota)):
            codes[r] = 0
        for n in range(number):
            place = tile + slots[s + 4 * n]
            bit, up = np.uint32(slots[s + 4 * n + 1]), np.uint32(slots[s + 4 * n + 2])
            at, half = _U(place // 4), _U(place // 2)
            if slots[s + 4 * n + 3] == 2:
                for r in range(_U(quota)):
                    codes[r] |= ((words[at + r] >> bit) & _THREE) << up
            else:
                for r in range(_U(quota)):
                    codes[r] |= ((np.uint32(halves[half + r]) >> bit) & _ONE) << up
        for r in range(_U(quota)):
            out[to + r] = levels[level + _U(codes[r])]
