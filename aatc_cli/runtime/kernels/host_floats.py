"""Numbers of 16 bits from float32 on a CPU, in machine code made by numba."""

# numba reads no annotations; functions are as long as what is kept in registers asks for
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import platform

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
_ONE = np.uint32(1)


@intrinsic
def float_bits(typingctx, number):
    """The bits of a float32."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), code


@intrinsic
def _half_by_machine(typingctx, number):
    def code(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), code


@njit(**_OPTIONS)
def half_by_hand(number):
    """Bits of the float16 nearest to a float32 that is in its range."""
    # in units in which what is denormal in float16 is so in float32
    bits = float_bits(np.float32(abs(number)) * np.float32(2.0**-112))
    bits = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & _ONE)) >> np.uint32(13)
    return np.uint16(bits | ((float_bits(number) >> np.uint32(16)) & np.uint32(0x8000)))


# where the machine has no such instruction, it would call a function that is not there
HAS_HALF = platform.machine() in ("aarch64", "arm64") or bool(binding.get_host_cpu_features().get("f16c", False))


_half_bits = _half_by_machine if HAS_HALF else half_by_hand


@njit(**_OPTIONS)
def half_of(number):
    """Bits of the float16 nearest to a float32, held at the largest."""
    return _half_bits(min(max(number, np.float32(-65504.0)), np.float32(65504.0)))


@njit(**_OPTIONS)
def brain_of(number):
    """Bits of the bfloat16 nearest to a float32."""
    bits = float_bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & _ONE)) >> np.uint32(16))
