"""Pages of 16-bit numbers to rows on a CPU, the rotation taken off, in machine code made by numba at first use."""

# numba reads no annotations
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from aatc_cli.runtime.kernels.host_floats import HAS_HALF

_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
_U = np.uint64


@intrinsic
def float_of(typingctx, bits):
    """The float32 of these bits."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), code


@intrinsic
def _wide_by_machine(typingctx, bits):
    def code(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), code


@njit(**_OPTIONS)
def _wide_by_hand(bits):
    # in units in which what is denormal in float16 is so in float32; infinities come out as large numbers
    rest = np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13)
    number = float_of(rest) * np.float32(2.0**112)
    return -number if bits & np.uint16(0x8000) else number


_wide_of = _wide_by_machine if HAS_HALF else _wide_by_hand


@njit(**_OPTIONS)
def widened(line, count, kind, out):
    """Numbers of 16 bits as float32: kind 1 is float16, 2 bfloat16. Whether all of them are finite."""
    most = np.uint16(0x7C00 if kind == 1 else 0x7F80)
    wrong = np.uint32(0)
    for e in range(_U(count)):
        wrong |= np.uint32((line[e] & most) == most)
    if kind == 1:
        for e in range(_U(count)):
            out[e] = _wide_of(line[e])
    else:
        for e in range(_U(count)):
            out[e] = float_of(np.uint32(line[e]) << np.uint32(16))
    return wrong == 0


@njit(**_OPTIONS)
def rows_of_pages(page, kind, dim, rotary, style, cos, sin, factor, out):
    """Rows [n, C] of the numbers ``page`` [n, C] of one side of one layer; whether all of them are finite.

    style 0 turns nothing, 1 has pairs half of ``rotary`` apart, 2 side by side; cos, sin [n, rotary]. ``factor``: what
    turned numbers are multiplied with, for rotations that are no pure ones.
    """
    tokens, channels = page.shape
    line, fine = np.zeros(channels, dtype=np.float32), True
    half, wide, turn = _U(rotary // 2), _U(dim), _U(rotary)
    for t in range(tokens):
        row = out[t]
        if style == 0:
            fine &= widened(page[t], channels, kind, row)
            continue
        fine &= widened(page[t], channels, kind, line)
        c, s = cos[t], sin[t]
        for head in range(_U(channels // dim)):
            h = head * wide
            if style == 1:
                for i in range(half):
                    x, y = line[h + i], line[h + half + i]
                    row[h + i] = (x * c[i] + y * s[i]) * factor
                    row[h + half + i] = (y * c[half + i] - x * s[half + i]) * factor
            else:
                for pair in range(half):
                    i = _U(2) * pair
                    x, y = line[h + i], line[h + i + _U(1)]
                    row[h + i] = (x * c[i] + y * s[i]) * factor
                    row[h + i + _U(1)] = (y * c[i + _U(1)] - x * s[i + _U(1)]) * factor
            for i in range(turn, wide):
                row[h + i] = line[h + i]
    return fine
