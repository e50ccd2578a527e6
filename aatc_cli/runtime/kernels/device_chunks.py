"""Tiles of stored chunks to pages on a GPU, in Triton; import it only where Triton is installed.

A program reads the tokens of one class of one or more tiles of one head group of one layer: rows of a matrix product
with the plan's matrix, whose columns lie as the rotation pairs them, the first of every pair before the second.
`decode_kernel` does all of that for one head; where a head group has several, `unpack_kernel` reads the codes once, a
library multiplies, and `finish_kernel` does the rest. Names: i_ an index, p_ a pointer, b_ a block of values.
"""

# Triton reads the annotations of a kernel: only its constants have any
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# annotations stay objects: the interpreter looks for tl.constexpr among them
from importlib import import_module
from typing import Any

from aatc_cli.runtime.kernels.device_parts import levels_of, rows_of, scales_of, slots_of, store_turned, tokens_of

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit
def decode_kernel(
    p_data,
    p_chunk,
    p_layer,
    p_nbytes,
    p_slot_at,
    p_slot_how,
    p_level_at,
    p_slots,
    p_levels,
    p_scale_at,
    p_scales,
    p_matrix,
    p_unit,
    p_bias,
    p_cos,
    p_sin,
    p_out,
    tiles,
    every,
    tokens,
    groups,
    class_stride,
    K: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    CLASS_BITS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    ROTARY: tl.constexpr,
    BESIDE: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    KB: tl.constexpr,
):
    """Class K of Q tokens a tile, for every head of D. Grid (ROWS of ``every`` tiles, heads, layers).

    data uint8; chunk [m], layer [L]: where the layers of a chunk of ``tiles`` tiles begin, and a layer behind that;
    nbytes [L] of a tile. Tables of the class, E channels padded: slot_at, slot_how [L, groups, 4, E], level_at
    [L, groups, E], slots [L, groups, E / 32 + 1] (the last: blocks of 32 that have any), scale_at [L, groups]. matrix
    [L, groups, E, HEADS, 2, H], unit [L, groups]: what one of its products is worth; bias
    [L, groups, HEADS, 2, H]; cos, sin [tokens, 2 H]. ROTARY channels of a head turn, in pairs BESIDE
    one another or half of that apart; out [L, tokens, channels].
    """
    i_rows, i_head, i_layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_group = i_head // HEADS
    i_part = (i_layer * groups + i_group).to(tl.int64)
    live, tile, row, p_tile = rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q, ROWS)
    b_token = row
    if CLASS_BITS > 0:
        b_token = tokens_of(p_tile + i_group * class_stride if BY_GROUP else p_tile, row, K, CLASS_BITS)
    b_scale = scales_of(p_tile, p_scales, tl.load(p_scale_at + i_part), row, SCALE_BITS) * tl.load(p_unit + i_part)
    b_low, b_high = tl.zeros([ROWS, H], tl.float32), tl.zeros([ROWS, H], tl.float32)
    pair = tl.arange(0, H)
    blocks = tl.cdiv(tl.load(p_slots + i_part * (E // 32 + 1) + E // 32), KB // 32)
    for block in range(blocks):
        slots = slots_of(p_slots, i_part, block, E, KB)
        column = block * KB + tl.arange(0, KB)
        b_level = levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E)
        i_matrix = ((i_part * E + column) * HEADS + i_head % HEADS)[:, None] * (2 * H) + pair[None, :]
        b_low = tl.dot(b_level, tl.load(p_matrix + i_matrix), b_low)
        b_high = tl.dot(b_level, tl.load(p_matrix + i_matrix + H), b_high)
    b_place = tile.to(tl.int64) * 64 + b_token
    i_out = (i_layer.to(tl.int64) * tokens + b_place) * (groups * HEADS * D) + i_head * D
    store_turned(
        b_low * b_scale[:, None],
        b_high * b_scale[:, None],
        b_place,
        live,
        p_bias,
        p_cos,
        p_sin,
        p_out,
        i_part * HEADS + i_head % HEADS,
        i_out,
        H,
        D // 2,
        ROTARY,
        BESIDE,
        BIAS,
        LARGEST,
    )


@triton.jit
def unpack_kernel(
    p_data,
    p_chunk,
    p_layer,
    p_nbytes,
    p_slot_at,
    p_slot_how,
    p_level_at,
    p_slots,
    p_levels,
    p_scale_at,
    p_scales,
    p_unit,
    p_latent,
    p_alpha,
    tiles,
    every,
    tokens,
    groups,
    class_stride,
    first,
    K: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    CLASS_BITS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KB: tl.constexpr,
):
    """Latents of class K before the token scale, and the scales. Grid (ROWS of ``every`` tiles, groups, layers).

    Tables as of `decode_kernel`; layers from ``first`` on. latent [layers, groups, tokens, E] float16, alpha
    [layers, groups, tokens].
    """
    i_rows, i_group = tl.program_id(0), tl.program_id(1)
    i_layer = tl.program_id(2) + first
    i_part = (i_layer * groups + i_group).to(tl.int64)
    live, tile, row, p_tile = rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q, ROWS)
    b_token = row
    if CLASS_BITS > 0:
        b_token = tokens_of(p_tile + i_group * class_stride if BY_GROUP else p_tile, row, K, CLASS_BITS)
    b_scale = scales_of(p_tile, p_scales, tl.load(p_scale_at + i_part), row, SCALE_BITS) * tl.load(p_unit + i_part)
    i_row = (tl.program_id(2) * groups + i_group).to(tl.int64) * tokens + tile.to(tl.int64) * 64 + b_token
    for block in range(E // KB):
        slots = slots_of(p_slots, i_part, block, E, KB)
        column = block * KB + tl.arange(0, KB)
        b_level = levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E)
        tl.store(p_latent + i_row[:, None] * E + column[None, :], b_level, mask=live[:, None])
    tl.store(p_alpha + i_row, b_scale, mask=live)


@triton.jit
def finish_kernel(
    p_rows,
    p_alpha,
    p_bias,
    p_cos,
    p_sin,
    p_out,
    tokens,
    groups,
    first,
    D: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    BESIDE: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Products to pages: rows [layers, groups, tokens, HEADS, 2, H]. Grid (ROWS of tokens, heads, layers)."""
    i_rows, i_head, i_layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_group = i_head // HEADS
    place = i_rows * ROWS + tl.arange(0, ROWS)
    live = place < tokens
    i_row = (i_layer * groups + i_group).to(tl.int64) * tokens + place
    b_scale = tl.load(p_alpha + i_row, mask=live, other=0.0)
    i_rows = (i_row * HEADS + i_head % HEADS)[:, None] * (2 * H) + tl.arange(0, H)[None, :]
    b_low = tl.load(p_rows + i_rows, mask=live[:, None], other=0.0).to(tl.float32)
    b_high = tl.load(p_rows + i_rows + H, mask=live[:, None], other=0.0).to(tl.float32)
    i_part = ((i_layer + first) * groups + i_group).to(tl.int64)
    i_out = ((i_layer + first).to(tl.int64) * tokens + place) * (groups * HEADS * D) + i_head * D
    store_turned(
        b_low * b_scale[:, None],
        b_high * b_scale[:, None],
        place,
        live,
        p_bias,
        p_cos,
        p_sin,
        p_out,
        i_part * HEADS + i_head % HEADS,
        i_out,
        H,
        D // 2,
        ROTARY,
        BESIDE,
        BIAS,
        LARGEST,
    )
