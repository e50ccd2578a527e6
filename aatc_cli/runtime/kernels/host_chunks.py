"""Tiles to pages on a CPU, one side of one layer at a time, in machine code made by numba at first use.

All arrays are flat, loops run over what lies side by side, and sizes are constants of a kernel (`kernel_of`): so the
compiler uses the whole width of a core's registers. Names: k class, g head group, r row (tokens of a tile by class),
t token, j channel with bits, e number of a head group.
"""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

TILE = 64
_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
_ONE, _THREE = np.uint32(1), np.uint32(3)
# places of no sign: one that may be negative is looked at before every load
_U = np.uint64


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
            for r in range(_U(quota)):
                out[to + r] = levels[level + _U((words[at + r] >> bit) & _THREE)]
            continue
        half = _U((tile + slots[s]) // 2)
        if number == 1:
            for r in range(_U(quota)):
                out[to + r] = levels[level + _U((np.uint32(halves[half + r]) >> bit) & _ONE)]
            continue
        again, more, up = _U((tile + slots[s + 4]) // 4), np.uint32(slots[s + 5]), np.uint32(slots[s + 6])
        if number == 2 and slots[s + 3] == 2:
            for r in range(_U(quota)):
                code = ((words[at + r] >> bit) & _THREE) | (((words[again + r] >> more) & _THREE) << up)
                out[to + r] = levels[level + _U(code)]
            continue
        if number == 2:
            for r in range(_U(quota)):
                code = ((np.uint32(halves[half + r]) >> bit) & _ONE) | (((words[again + r] >> more) & _THREE) << up)
                out[to + r] = levels[level + _U(code)]
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


def _decoded(size: int) -> Any:
    """Rows [quota, E] of latents times ``basis`` [count, E]: two rows, eight channels at a time."""
    n = _U(size)

    @njit(**_OPTIONS)
    def decoded(latents, basis, count, quota, out):
        whole = count // _U(8)
        for pair in range(quota // _U(2)):
            r = _U(2) * pair
            o, p = r * n, r * n + n
            for e in range(n):
                out[o + e] = 0.0
                out[p + e] = 0.0
            for block in range(whole):
                i, q = _U(8 * TILE) * block + r, _U(8) * block * n
                k = i + _U(1)
                a0, a1, a2, a3 = latents[i], latents[i + _U(64)], latents[i + _U(128)], latents[i + _U(192)]
                a4, a5, a6, a7 = latents[i + _U(256)], latents[i + _U(320)], latents[i + _U(384)], latents[i + _U(448)]
                b0, b1, b2, b3 = latents[k], latents[k + _U(64)], latents[k + _U(128)], latents[k + _U(192)]
                b4, b5, b6, b7 = latents[k + _U(256)], latents[k + _U(320)], latents[k + _U(384)], latents[k + _U(448)]
                for e in range(n):
                    d0, d1, d2 = basis[q + e], basis[q + n + e], basis[q + _U(2) * n + e]
                    d3, d4, d5 = basis[q + _U(3) * n + e], basis[q + _U(4) * n + e], basis[q + _U(5) * n + e]
                    d6, d7 = basis[q + _U(6) * n + e], basis[q + _U(7) * n + e]
                    out[o + e] += a0 * d0 + a1 * d1 + a2 * d2 + a3 * d3 + a4 * d4 + a5 * d5 + a6 * d6 + a7 * d7
                    out[p + e] += b0 * d0 + b1 * d1 + b2 * d2 + b3 * d3 + b4 * d4 + b5 * d5 + b6 * d6 + b7 * d7
            for j in range(_U(8) * whole, count):
                a, b, q = latents[_U(TILE) * j + r], latents[_U(TILE) * j + r + _U(1)], j * n
                for e in range(n):
                    out[o + e] += a * basis[q + e]
                    out[p + e] += b * basis[q + e]

    return decoded


def _turned(size: int, dim: int, rotary: int, style: int) -> Any:
    """Rotate the heads of a tile's rows [64, E] in place: style 1 has pairs half a rotary width apart, 2 side by side.

    ``angle``: place in the tables of the tile's first token.
    """
    n, wide, step, half = _U(size), _U(dim), _U(rotary), _U(rotary // 2)
    pairs_apart = style == 1

    @njit(**_OPTIONS)
    def turned(rows, angle, cos, sin):
        for t in range(_U(TILE)):
            a = angle + t * step
            for head in range(n // wide):
                h = t * n + head * wide
                if pairs_apart:
                    for i in range(half):
                        x, y = rows[h + i], rows[h + half + i]
                        rows[h + i] = x * cos[a + i] - y * sin[a + i]
                        rows[h + half + i] = y * cos[a + half + i] + x * sin[a + half + i]
                else:
                    for pair in range(half):
                        i = _U(2) * pair
                        x, y = rows[h + i], rows[h + i + _U(1)]
                        rows[h + i] = x * cos[a + i] - y * sin[a + i]
                        rows[h + i + _U(1)] = y * cos[a + i + _U(1)] + x * sin[a + i + _U(1)]

    return turned


def written_of(size: int) -> Any:
    """Write rows [count, E], whose bits are ``bits``, ``step`` apart: kind 0 as float32, 1 float16, 2 bfloat16."""
    n = _U(size)

    @njit(**_OPTIONS)
    def written(rows, bits, scaled, scaled_bits, count, kind, wide, narrow, to, step):
        for t in range(_U(count)):
            row, out = t * n, to + t * step
            if kind == 0:
                for e in range(n):
                    wide[out + e] = rows[row + e]
            elif kind == 2:
                for e in range(n):
                    b = bits[row + e]
                    b = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & _ONE)) >> np.uint32(16)
                    narrow[out + e] = np.uint16(b)
            else:
                for e in range(n):
                    # in units in which what is denormal in float16 is so in float32; held at the largest
                    scaled[e] = min(abs(rows[row + e]), np.float32(65504.0)) * np.float32(2.0**-112)
                for e in range(n):
                    b = scaled_bits[e]
                    b = (b + np.uint32(0xFFF) + ((b >> np.uint32(13)) & _ONE)) >> np.uint32(13)
                    narrow[out + e] = np.uint16(b | ((bits[row + e] >> np.uint32(16)) & np.uint32(0x8000)))

    return written


def _placed(size: int) -> Any:
    """Rows of a tile from the order of their classes to that of their tokens, times their scales, with the bias."""
    n = _U(size)

    @njit(**_OPTIONS)
    def placed(rows, row, scale, bias, out):
        for t in range(TILE):
            source, to, alpha = _U(row[t]) * n, _U(t) * n, scale[row[t]]
            for e in range(n):
                out[to + e] = rows[source + e] * alpha
            if bias.shape[0]:
                for e in range(n):
                    out[to + e] += bias[e]

    return placed


@lru_cache(maxsize=16)
def kernel_of(size: int, dim: int, rotary: int, style: int) -> Any:
    """The kernel for head groups of ``size`` channels and heads of ``dim``, of which ``rotary`` are turned.

    It writes pages [n, C] of one side of one layer, and says whether every tile had classes of the right sizes. data,
    words, halves: the same bytes in units of 1, 4 and 2; tables
    as in `tables.SideTables`, flat. cos, sin [n, R]. kind: 0 writes float32 to ``wide``, 1 float16 and 2 bfloat16 to
    ``narrow``.
    """
    decoded, placed = _decoded(size), _placed(size)
    turned, written = _turned(size, dim, rotary, style), written_of(size)

    @njit(**_OPTIONS)
    def decode_side(
        data,
        words,
        halves,
        nbytes,
        parts,
        entries,
        slots,
        levels,
        basis,
        scales,
        scale_bits,
        bias,
        quotas,
        orders,
        class_bits,
        class_stride,
        cos,
        sin,
        kind,
        wide,
        narrow,
    ):
        codes, scale = np.zeros(TILE, dtype=np.uint32), np.zeros(TILE, dtype=np.float32)
        latents, rows = np.zeros(size * TILE, dtype=np.float32), np.zeros(TILE * size, dtype=np.float32)
        tokens, scaled = np.zeros(TILE * size, dtype=np.float32), np.zeros(size, dtype=np.float32)
        bits, scaled_bits = tokens.view(np.uint32), scaled.view(np.uint32)
        row, groups = np.arange(TILE), parts.shape[1]
        for g in range(groups):
            for tile in range(data.shape[0] // nbytes):
                base, start = tile * nbytes, 0
                if class_bits > 0:
                    order = base + (g if orders > 1 else 0) * class_stride
                    if not rows_of(data, order, class_bits, quotas, row):
                        return False
                for k in range(quotas.shape[0]):
                    first, count, place = parts[k, g, 0], parts[k, g, 1], parts[k, g, 2]
                    stop = start + quotas[k]
                    if count:
                        scales_of(data, base + place, scale_bits, scales, quotas[k], scale, start)
                        latents_of(words, halves, base, entries, slots, levels, first, count, quotas[k], codes, latents)
                    mine = basis[first * size : (first + count) * size]
                    decoded(latents, mine, _U(count), _U(quotas[k]), rows[start * size : stop * size])
                    start = stop
                own = bias[g * size : (g + 1) * size] if bias.shape[0] else bias
                placed(rows, row, scale, own, tokens)
                if style:
                    turned(tokens, _U(tile * TILE * rotary), cos, sin)
                to = _U((tile * TILE * groups + g) * size)
                written(tokens, bits, scaled, scaled_bits, TILE, kind, wide, narrow, to, _U(groups * size))
        return True

    return decode_side
