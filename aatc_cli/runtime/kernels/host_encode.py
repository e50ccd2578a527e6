"""Latents to tiles on a CPU, one side of one layer at a time, in machine code made by numba at first use.

What `core.lloyd.quantize` and `core.tile_packing` do, but for rounding. Loops run over the tokens of a class, which lie
side by side. Names: k class, g head group, j channel with bits, r row (tokens of a tile by class), i candidate.
"""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import math

import numpy as np
from numba import njit

TILE = 64
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
def packed(codes, row_of, channel, shift, planes, at, base, quota, wide, narrow, word):
    """Planes of one class of a head group from its codes [n, TILE]; ``row_of``: the row of a channel in them."""
    for plane in range(planes[1]):
        bits = 2 if plane < planes[0] else 1
        for r in range(_U(quota)):
            word[r] = 0
        for digit in range(16):
            c = channel[plane, digit]
            if c < 0:
                continue
            from_, up, to = _U(row_of[c] * TILE), np.uint32(shift[plane, digit]), np.uint32(bits * digit)
            mask = np.uint32(2 * bits - 1)
            for r in range(_U(quota)):
                word[r] |= ((np.uint32(codes[from_ + r]) >> up) & mask) << to
        if bits == 2:
            place = _U((base + at[plane]) // 4)
            for r in range(_U(quota)):
                wide[place + r] = word[r]
        else:
            place = _U((base + at[plane]) // 2)
            for r in range(_U(quota)):
                narrow[place + r] = np.uint16(word[r])


@njit(**_OPTIONS)
def put_scales(held, place, bits, quota, out):
    """Codes of the scales of a class at ``place``."""
    for r in range(quota):
        if bits == 8:
            out[place + r] = held[r]
        elif bits == 16:
            out[place + 2 * r], out[place + 2 * r + 1] = held[r] & 255, held[r] >> 8
        elif r % 2 == 0:
            out[place + r // 2] = held[r] | (held[r + 1] << 4)


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
def encode_side(
    units,
    order,
    widths,
    prices,
    edges,
    rises,
    sizes,
    starts,
    factors,
    scales,
    inverses,
    scale_steps,
    scale_one,
    scale_bits,
    channel,
    shift,
    at,
    planes,
    scale_at,
    quotas,
    nbytes,
    out,
    wide,
    narrow,
):
    """Tiles of one side of one layer into ``out``, in units of 1, 4 and 2 bytes, from units [groups, E, n].

    order [orders, n]: the token of a tile in every row. Tables of every class: widths, prices [K, groups, E], channel,
    shift [K, groups, P, 16], at [K, groups, P], planes [K, groups, 2], scale_at [K, groups]; starts, edges, sizes as of
    `encode_tables.SideCodes`.
    """
    groups, size, tokens = units.shape
    count, most = factors.shape[0], (1 << scale_bits) - 1
    unit, near = np.zeros(size * TILE, dtype=np.float32), np.zeros(count * TILE, dtype=np.float32)
    wanted = np.zeros(count * TILE, dtype=np.float32)
    codes, row_of = np.zeros(size * TILE, dtype=np.uint8), np.zeros(size, dtype=np.int64)
    energy, amount = np.zeros(TILE, dtype=np.float32), np.zeros(size * TILE, dtype=np.float32)
    alpha, inverse = np.zeros(count * TILE, dtype=np.float32), np.zeros(count * TILE, dtype=np.float32)
    error, held = np.zeros(count * TILE, dtype=np.float32), np.zeros(count * TILE, dtype=np.int64)
    best, found, word = np.zeros(TILE, dtype=np.int64), np.zeros(TILE, dtype=np.int32), np.zeros(TILE, dtype=np.uint32)
    logs = np.log2(factors)
    for g in range(groups):
        places = order[g if order.shape[0] > 1 else 0]
        for tile in range(tokens // TILE):
            base, first = tile * nbytes, 0
            for k in range(quotas.shape[0]):
                quota, here, every = quotas[k], tile * TILE + first, _U(count * quotas[k])
                first += quota
                if scale_at[k, g] < 0:
                    continue
                coded = 0
                for r in range(quota):
                    energy[r] = 0
                for c in range(size):
                    if widths[k, g, c] == 0:
                        continue
                    to = coded * TILE
                    if order.shape[1] == 0:
                        for r in range(quota):
                            unit[to + r] = units[g, c, here + r]
                    else:
                        for r in range(quota):
                            unit[to + r] = units[g, c, tile * TILE + places[here + r]]
                    for r in range(quota):
                        energy[r] += unit[to + r] * unit[to + r]
                        amount[to + r] = abs(unit[to + r])
                    row_of[c] = coded
                    coded += 1
                for r in range(quota):
                    root = np.float32(math.sqrt(energy[r] / np.float32(coded)))
                    log_root = math.log2(root) if root > 0 else 0.0
                    for i in range(count):
                        if scale_bits == 16:
                            place = scale_half(root * factors[i])
                        else:
                            place = scale_code(root, log_root, factors[i], logs[i], scale_steps, scale_one, most)
                        held[i * quota + r] = place
                        alpha[i * quota + r] = scales[place]
                        inverse[i * quota + r] = inverses[place]
                        error[i * quota + r] = 0
                for c in range(size):
                    width = widths[k, g, c]
                    if width == 0:
                        continue
                    from_ = _U(row_of[c] * TILE)
                    for i in range(_U(count)):
                        to = i * _U(quota)
                        for r in range(_U(quota)):
                            wanted[to + r] = amount[from_ + r]
                    price = prices[k, g, c]
                    add_errors(
                        wanted[:every], inverse, alpha, edges, rises, sizes, width, starts[width], price, near, error
                    )
                best_of(error, held, count, quota, best)
                for r in range(quota):
                    inverse[r] = inverses[best[r]]
                for c in range(size):
                    width = widths[k, g, c]
                    if width == 0:
                        continue
                    to, half = _U(row_of[c] * TILE), np.int32(1 << (width - 1))
                    indices(amount[to : to + _U(quota)], inverse[:quota], edges, width, starts[width], found)
                    for r in range(_U(quota)):
                        codes[to + r] = half + found[r] if unit[to + r] > 0 else half - 1 - found[r]
                packed(
                    codes, row_of, channel[k, g], shift[k, g], planes[k, g], at[k, g], base, quota, wide, narrow, word
                )
                put_scales(best, base + scale_at[k, g], scale_bits, quota, out)


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
