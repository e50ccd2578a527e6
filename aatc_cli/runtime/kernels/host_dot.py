"""Products in bfloat16 on CPUs with AVX512-BF16: four rows by 64 columns at a time, sums in float32.

The instruction multiplies pairs of neighbouring numbers and adds both products, so factors lie in pairs. numba has no
words for it: the loop is written in LLVM's own.
"""

# numba reads no annotations
# ruff: noqa: ANN001, ANN201, ANN202, ANN204
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import platform

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

ROWS, COLUMNS = 4, 64
_LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_WORDS = ir.VectorType(ir.IntType(32), _LANES)
_INT = ir.IntType(64)
_NAME = "llvm.x86.avx512bf16.dpbf16ps.512"
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

HAS_DOT = platform.machine() in ("x86_64", "AMD64") and all(
    binding.get_host_cpu_features().get(name, False) for name in ("avx512f", "avx512bf16")
)


class _Pairs(ir.Type):
    """Sixteen pairs of bfloat16, for which llvmlite has no type."""

    def _to_string(self):
        return "<32 x bfloat>"

    def __eq__(self, other):
        return isinstance(other, _Pairs)

    def __hash__(self):
        return hash(_Pairs)


@intrinsic
def _four_rows(typingctx, left, step, right, stride, pairs, out, width):
    """Rows [4, 64] in float32 to the address ``out``, ``width`` apart, of pairs at two addresses.

    left: of one pair of every row, ``step`` words further the next; right: of one pair of every column, ``stride``
    words further the next.
    """

    def code(context, builder, signature, args):
        left, step, right, stride, pairs, out, width = args
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _Pairs(), _Pairs()])
        dot = builder.module.globals.get(_NAME) or ir.Function(builder.module, kind, _NAME)
        left = builder.inttoptr(left, ir.IntType(32).as_pointer())
        right = builder.inttoptr(right, ir.IntType(32).as_pointer())
        out = builder.inttoptr(out, ir.FloatType().as_pointer())
        entry, zero = builder.block, ir.Constant(_FLOATS, [0.0] * _LANES)
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(_INT)
        place.add_incoming(ir.Constant(_INT, 0), entry)
        sums = [[builder.phi(_FLOATS) for _ in range(COLUMNS // _LANES)] for _ in range(ROWS)]
        columns = []
        for lane in range(COLUMNS // _LANES):
            at = builder.add(builder.mul(place, stride), ir.Constant(_INT, _LANES * lane))
            held = builder.load(builder.bitcast(builder.gep(right, [at]), _WORDS.as_pointer()))
            held.align = 4
            columns.append(builder.bitcast(held, _Pairs()))
        following = builder.add(place, ir.Constant(_INT, 1))
        again = builder.icmp_unsigned("<", following, pairs)
        place.add_incoming(following, loop)
        whole = []
        for row in range(ROWS):
            word = builder.load(builder.gep(left, [builder.add(builder.mul(place, step), ir.Constant(_INT, row))]))
            nothing = ir.Constant(_WORDS, ir.Undefined)
            one = builder.insert_element(nothing, word, ir.Constant(ir.IntType(32), 0))
            spread = builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * _LANES))
            mine = builder.bitcast(spread, _Pairs())
            made = [builder.call(dot, [held, mine, column]) for held, column in zip(sums[row], columns, strict=True)]
            for held, more in zip(sums[row], made, strict=True):
                held.add_incoming(zero, entry)
                held.add_incoming(more, loop)
            whole.append(made)
        builder.cbranch(again, loop, done)
        builder.position_at_end(done)
        for row in range(ROWS):
            for lane in range(COLUMNS // _LANES):
                at = builder.add(builder.mul(width, ir.Constant(_INT, row)), ir.Constant(_INT, _LANES * lane))
                target = builder.bitcast(builder.gep(out, [at]), _FLOATS.as_pointer())
                builder.store(whole[row][lane], target).align = 4
        return ir.Constant(_INT, 0)

    return types.int64(*[types.uint64] * 7), code


@njit(**_OPTIONS)
def paired(numbers, count, step, rows, out):
    """Pairs of neighbouring channels of bfloat16 bits [count, step] as words [pairs, step]; an odd last one alone."""
    for pair in range(count // 2):
        a, b, to = np.uint64(2 * pair * step), np.uint64((2 * pair + 1) * step), np.uint64(pair * step)
        for r in range(np.uint64(rows)):
            out[to + r] = numbers[a + r] | (numbers[b + r] << np.uint32(16))
    if count % 2:
        a, to = np.uint64((count - 1) * step), np.uint64((count // 2) * step)
        for r in range(np.uint64(rows)):
            out[to + r] = numbers[a + r]


@njit(**_OPTIONS)
def products(pairs, step, basis, columns, count, rows, out):
    """Rows [rows, columns] in float32 of ``count`` pairs [count, step] and [count, columns]; count may be 0."""
    if count == 0:
        for e in range(np.uint64(rows * columns)):
            out[e] = 0
        return
    for block in range(0, columns, COLUMNS):
        for row in range(0, rows, ROWS):
            _four_rows(
                np.uint64(pairs.ctypes.data + 4 * row),
                np.uint64(step),
                np.uint64(basis.ctypes.data + 4 * block),
                np.uint64(columns),
                np.uint64(count),
                np.uint64(out.ctypes.data + 4 * (row * columns + block)),
                np.uint64(columns),
            )
