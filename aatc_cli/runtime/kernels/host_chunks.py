"""Tiles to pages on a CPU, one side of one layer at a time, in machine code made by numba at first use.

All arrays are flat, loops run over what lies side by side, and sizes are constants of a kernel (`kernel_of`): so the
compiler uses the whole width of a core's registers. Names: k class, g head group, r row (tokens of a tile by class),
t token, j channel with bits, e number of a head group.
"""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from aatc_cli.runtime.kernels.host_dot import COLUMNS, HAS_DOT, paired, products
from aatc_cli.runtime.kernels.host_floats import brain_of, half_of
from aatc_cli.runtime.kernels.host_latents import latents_of, rows_of, scales_of

TILE = 64
_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
# places of no sign: one that may be negative is looked at before every load
_U = np.uint64


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


def finished_of(size: int, dim: int, rotary: int, style: int) -> Any:
    """Rows of a tile [64, E] by class to pages of ``kind``: in the order of tokens, scaled, with the bias, rotated.

    style 0 turns nothing, 1 has pairs half a rotary width apart, 2 side by side. ``angle``: place in the tables of the
    tile's first token; tokens are written ``step`` apart from ``to`` on.
    """
    n, wide, turn, half = _U(size), _U(dim), _U(rotary), _U(rotary // 2)
    heads = _U(size // dim)

    @njit(**_OPTIONS)
    def turned(rows, source, alpha, bias, angle, cos, sin, line):
        for head in range(heads):
            h = head * wide
            s = source + h
            if style == 1:
                for i in range(half):
                    x = rows[s + i] * alpha + bias[h + i]
                    y = rows[s + half + i] * alpha + bias[h + half + i]
                    line[h + i] = x * cos[angle + i] - y * sin[angle + i]
                    line[h + half + i] = y * cos[angle + half + i] + x * sin[angle + half + i]
            else:
                for pair in range(half):
                    i = _U(2) * pair
                    x = rows[s + i] * alpha + bias[h + i]
                    y = rows[s + i + _U(1)] * alpha + bias[h + i + _U(1)]
                    line[h + i] = x * cos[angle + i] - y * sin[angle + i]
                    line[h + i + _U(1)] = y * cos[angle + i + _U(1)] + x * sin[angle + i + _U(1)]
            for i in range(turn, wide):
                line[h + i] = rows[s + i] * alpha + bias[h + i]

    @njit(**_OPTIONS)
    def finished(rows, row, scale, bias, angle, cos, sin, kind, wide_out, narrow_out, to, step, line):
        for t in range(_U(TILE)):
            source, out, alpha = _U(row[t]) * n, to + t * step, scale[row[t]]
            if style:
                turned(rows, source, alpha, bias, angle + t * turn, cos, sin, line)
            else:
                for e in range(n):
                    line[e] = rows[source + e] * alpha + bias[e]
            if kind == 0:
                for e in range(n):
                    wide_out[out + e] = line[e]
            elif kind == 1:
                for e in range(n):
                    narrow_out[out + e] = half_of(line[e])
            else:
                for e in range(n):
                    narrow_out[out + e] = brain_of(line[e])

    return finished


@lru_cache(maxsize=16)
def kernel_of(size: int, dim: int, rotary: int, style: int) -> Any:
    """The kernel for head groups of ``size`` channels and heads of ``dim``, of which ``rotary`` are turned.

    It writes pages [L, n, C] of one side of the layers ``first`` to ``last``, and says whether every tile had classes
    of the right sizes. data, words, halves: the chunk in units of 1, 4 and 2 bytes; starts [L]: the byte where a layer
    begins. places [L, 5]: where a layer's tables begin in those of all (`host_decode.LayerTables`), and bytes of its
    tile. cos, sin [n, R]. kind: 0 writes float32 to ``wide``, 1 float16 and 2 bfloat16 to ``narrow``, layers ``stride``
    numbers apart, from ``to`` on. Where the machine can, pages in bfloat16 come of products in bfloat16.
    """
    decoded, finished = _decoded(size), finished_of(size, dim, rotary, style)
    n, narrow_dot = _U(size), HAS_DOT and size % COLUMNS == 0

    @njit(**_OPTIONS)
    def decode_layers(
        data,
        words,
        halves,
        starts,
        tiles,
        places,
        parts,
        entries,
        slots,
        levels,
        level_bits,
        basis,
        pair_basis,
        pair_places,
        scales,
        scale_bits,
        biases,
        quotas,
        orders,
        class_bits,
        class_stride,
        cos,
        sin,
        kind,
        wide,
        narrow,
        to,
        stride,
        first,
        last,
    ):
        codes, scale = np.zeros(TILE, dtype=np.uint32), np.zeros(TILE, dtype=np.float32)
        latents, rows = np.zeros(size * TILE, dtype=np.float32), np.zeros(TILE * size, dtype=np.float32)
        bits, pairs = np.zeros(size * TILE, dtype=np.uint32), np.zeros((size + 1) // 2 * TILE, dtype=np.uint32)
        line, row, groups = np.zeros(size, dtype=np.float32), np.arange(TILE), parts.shape[2]
        for layer in range(first, last):
            own_entries = entries[4 * places[layer, 0] : 4 * places[layer + 1, 0]]
            own_slots = slots[4 * places[layer, 1] : 4 * places[layer + 1, 1]]
            own_bits = level_bits[places[layer, 2] : places[layer + 1, 2]]
            own_levels = levels[places[layer, 2] : places[layer + 1, 2]]
            own_basis = basis[places[layer, 0] * size : places[layer + 1, 0] * size]
            for g in range(groups):
                bias = biases[layer, g * size : (g + 1) * size]
                for tile in range(tiles):
                    base, start = starts[layer] + tile * places[layer, 3], 0
                    if class_bits > 0:
                        order = base + (g if orders > 1 else 0) * class_stride
                        if not rows_of(data, order, class_bits, quotas, row):
                            return False
                    for k in range(quotas.shape[0]):
                        at, count, place = parts[layer, k, g, 0], parts[layer, k, g, 1], parts[layer, k, g, 2]
                        stop = start + quotas[k]
                        if count:
                            scales_of(data, base + place, scale_bits, scales, quotas[k], scale, start)
                        mine = rows[start * size : stop * size]
                        if narrow_dot and kind == 2:
                            latents_of(
                                words, halves, base, own_entries, own_slots, own_bits, at, count, quotas[k], codes, bits
                            )
                            paired(bits, count, TILE, quotas[k], pairs)
                            first_pair = pair_places[layer, k, g] * size
                            products(pairs, TILE, pair_basis[first_pair:], size, (count + 1) // 2, quotas[k], mine)
                        else:
                            latents_of(
                                words,
                                halves,
                                base,
                                own_entries,
                                own_slots,
                                own_levels,
                                at,
                                count,
                                quotas[k],
                                codes,
                                latents,
                            )
                            own = own_basis[at * size : (at + count) * size]
                            decoded(latents, own, _U(count), _U(quotas[k]), mine)
                        start = stop
                    out = _U(to + layer * stride + (tile * TILE * groups + g) * size)
                    angle = _U(tile * TILE * rotary)
                    finished(rows, row, scale, bias, angle, cos, sin, kind, wide, narrow, out, n * _U(groups), line)
        return True

    return decode_layers
