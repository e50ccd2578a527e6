"""The search for a token scale and for nearest levels on a CPU, in machine code made by numba.

Names: r row (tokens of a tile by class), i candidate, m candidate and row.
"""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import math

import numpy as np
from numba import njit

_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "boundscheck": False}
_U = np.uint64


# of a step between scales: what is nearer to the middle of one is rounded as torch does it, by way of float16
_NEAR = 0.0125


@njit(**_OPTIONS)
def scale_code(root, log_root, factor, log_factor, steps, one, most):
    """The code of the scale nearest to ``factor`` times a root mean square, on the grid of `core.scales`."""
    if root == 0:
        return 0
    place = (log_root + log_factor) * steps
    if abs(place - math.floor(place) - 0.5) < _NEAR:
        product = np.float32(root * np.float32(factor))
        # eleven bits of a float16 that is not denormal
        part, power = math.frexp(min(product, np.float32(65504.0)))
        place = math.log2(math.ldexp(np.rint(part * 2048.0) / 2048.0, power)) * steps
    code = int(np.rint(place)) + one
    return min(max(code, 1), most)


@njit(**_OPTIONS)
def add_errors(amount, inverse, alpha, edges, rises, sizes, width, start, price, near, error):
    """Add ``price`` times the squared error of every candidate of every row to ``error`` [n].

    amount [n]: sizes, to be coded at scales alpha, whose inverses are there too. The magnitudes nearest to their ratio
    lie between ``edges``, ``rises`` apart. All edges are compared with, four at a time: a search of the right one would
    have to gather, which takes forty times as long.
    """
    count, first = _U(amount.shape[0]), sizes[start]
    if width == 1:
        for m in range(count):
            off = first * alpha[m] - amount[m]
            error[m] += price * off * off
        return
    zero = np.float32(0)
    if width == 2:
        edge, rise = edges[start], rises[start]
        for m in range(count):
            off = (first + (rise if amount[m] * inverse[m] > edge else zero)) * alpha[m] - amount[m]
            error[m] += price * off * off
        return
    if width == 3:
        a, b, c = edges[start], edges[start + 1], edges[start + 2]
        d, e, f = rises[start], rises[start + 1], rises[start + 2]
        for m in range(count):
            x = amount[m] * inverse[m]
            level = first + (d if x > a else zero) + (e if x > b else zero) + (f if x > c else zero)
            off = level * alpha[m] - amount[m]
            error[m] += price * off * off
        return
    for m in range(count):
        near[m] = first
    for four in range(start, start + (1 << (width - 1)), 4):
        a, b, c, g = edges[four], edges[four + 1], edges[four + 2], edges[four + 3]
        d, e, f, h = rises[four], rises[four + 1], rises[four + 2], rises[four + 3]
        for m in range(count):
            x = amount[m] * inverse[m]
            more = (d if x > a else zero) + (e if x > b else zero)
            near[m] += more + (f if x > c else zero) + (h if x > g else zero)
    for m in range(count):
        off = near[m] * alpha[m] - amount[m]
        error[m] += price * off * off


@njit(**_OPTIONS)
def indices(size, inverse, edges, width, start, found):
    """Places of the magnitudes nearest to ``size`` [n] times ``inverse``, into ``found``."""
    count = _U(size.shape[0])
    for r in range(count):
        found[r] = 0
    for edge in range((1 << (width - 1)) - 1):
        at = edges[start + edge]
        for r in range(count):
            found[r] += np.int32(1) if size[r] * inverse[r] > at else np.int32(0)


@njit(**_OPTIONS)
def best_of(error, held, count, quota, best):
    """The candidate with the least error of every row, the first of equals."""
    for r in range(quota):
        chosen = 0
        for i in range(1, count):
            if error[i * quota + r] < error[chosen * quota + r]:
                chosen = i
        best[r] = held[chosen * quota + r]


@njit(**_OPTIONS)
def scale_half(number):
    """Bits of the float16 nearest to a scale."""
    part, power = math.frexp(min(number, np.float32(65504.0)))
    if number == 0 or power < -23:
        return 0
    if power < -13:
        return int(np.rint(math.ldexp(part, power + 24)))
    digits = int(np.rint(part * 2048.0))
    return ((power + 14) << 10) + digits - 1024
