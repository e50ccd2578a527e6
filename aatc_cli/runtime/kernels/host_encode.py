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

from aatc_cli.runtime.kernels.host_search import add_errors, best_of, indices, scale_code, scale_half

TILE = 64
_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "boundscheck": False}
_U = np.uint64


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
