"""Tiles of stored chunks to pages on a GPU, in Triton; import it only where Triton is installed.

A program reads the tokens of one class of one or more tiles of one head group of one layer: rows of a matrix product
with the plan's matrix, whose columns lie as the rotation pairs them, the first of every pair before the second.
`decode_kernel` does all of that for one head; where a head group has several, `unpack_kernel` reads the codes once, a
library multiplies, and `finish_kernel` does the rest. Names: i_ an index, p_ a pointer, b_ a block of values.
"""

# Triton reads the annotations of a kernel: only its constants have any
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# annotations stay objects: the interpreter looks for tl.constexpr among them
from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit
def _rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q: tl.constexpr, ROWS: tl.constexpr):
    """What a program of ROWS tokens of a class reads: which are there, their tile, their number, where tiles begin."""
    place = i_rows * ROWS + tl.arange(0, ROWS)
    live = place // Q < every
    tile = tl.where(live, place // Q, 0)
    p_tile = p_data + tl.load(p_chunk + tile // tiles) + tl.load(p_layer + i_layer)
    return live, tile, place % Q, p_tile + (tile % tiles).to(tl.int64) * tl.load(p_nbytes + i_layer)


@triton.jit
def _tokens_of(p_class, row, K: tl.constexpr, CLASS_BITS: tl.constexpr):
    """The token [ROWS] of a tile that is number ``row`` of those of class K; its masks begin at ``p_class``."""
    b_token, b_count = row, row * 0
    for byte in range(8):
        b_low = tl.load(p_class + byte).to(tl.int32)
        b_high = b_low
        if CLASS_BITS == 2:
            b_high = tl.load(p_class + 8 + byte).to(tl.int32)
        for bit in tl.static_range(8):
            b_class = (b_low >> bit) & 1
            if CLASS_BITS == 2:
                b_class += ((b_high >> bit) & 1) << 1
            b_mine = b_class == K
            b_token = tl.where(b_mine & (b_count == row), byte * 8 + bit, b_token)
            b_count += b_mine.to(tl.int32)
    return b_token


@triton.jit
def _slots_of(p_slots, i_part, block, E: tl.constexpr, KB: tl.constexpr):
    """The most digits that a channel of a block has."""
    p_first = p_slots + i_part * (E // 32 + 1) + block * (KB // 32)
    slots = tl.load(p_first)
    for part in tl.static_range(1, KB // 32):
        slots = tl.maximum(slots, tl.load(p_first + part))
    return slots


@triton.jit
def _levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E: tl.constexpr):
    """What the codes [ROWS, n] of some channels are read as, before the token scale."""
    b_code = row[:, None] * 0 + column[None, :] * 0
    for slot in range(slots):
        i_slot = (i_part * 4 + slot) * E + column
        b_how = tl.load(p_slot_how + i_slot)
        b_at = tl.load(p_slot_at + i_slot)[None, :] + row[:, None] * ((b_how >> 12) & 7)[None, :]
        b_used = ((b_how >> 8) & 3)[None, :]
        b_byte = tl.load(p_tile[:, None] + b_at, mask=b_used > 0, other=0).to(tl.int32)
        b_code |= ((b_byte >> (b_how & 7)[None, :]) & b_used) << ((b_how >> 3) & 15)[None, :]
    return tl.load(p_levels + tl.load(p_level_at + i_part * E + column)[None, :] + b_code)


@triton.jit
def _scales_of(p_tile, p_scales, i_scale, row, SCALE_BITS: tl.constexpr):
    """The token scales [ROWS]; zero where a class has no bits."""
    p_scale = p_tile + tl.maximum(i_scale, 0)
    if SCALE_BITS == 8:
        b_index = tl.load(p_scale + row).to(tl.int32)
    elif SCALE_BITS == 16:
        b_index = tl.load(p_scale + 2 * row).to(tl.int32) | (tl.load(p_scale + 2 * row + 1).to(tl.int32) << 8)
    else:
        b_index = (tl.load(p_scale + row // 2).to(tl.int32) >> (4 * (row % 2))) & 15
    return tl.where(i_scale >= 0, tl.load(p_scales + b_index), 0.0)


@triton.jit
def _store_turned(
    b_low,
    b_high,
    b_place,
    live,
    p_bias,
    p_cos,
    p_sin,
    p_out,
    i_head,
    i_out,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY: tl.constexpr,
    BESIDE: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Pairs [ROWS, H] with their bias, rotated by their places [ROWS], as numbers of ``out``.

    Channels are found by arithmetic, so that the compiler sees which of them lie side by side.
    """
    pair = tl.arange(0, H)
    if BIAS:
        b_low += tl.load(p_bias + i_head * 2 * H + pair)[None, :]
        b_high += tl.load(p_bias + i_head * 2 * H + H + pair)[None, :]
    b_first, b_second = b_low, b_high
    if ROTARY > 0:
        i_angle = b_place[:, None] * (2 * H) + pair[None, :]
        mask = live[:, None]
        b_cos, b_sin = tl.load(p_cos + i_angle, mask=mask, other=0.0), tl.load(p_sin + i_angle, mask=mask, other=0.0)
        b_first = b_low * b_cos - b_high * b_sin
        b_cos = tl.load(p_cos + i_angle + H, mask=mask, other=0.0)
        b_sin = tl.load(p_sin + i_angle + H, mask=mask, other=0.0)
        b_second = b_high * b_cos + b_low * b_sin
    b_first = tl.minimum(tl.maximum(b_first, -LARGEST), LARGEST).to(p_out.dtype.element_ty)
    b_second = tl.minimum(tl.maximum(b_second, -LARGEST), LARGEST).to(p_out.dtype.element_ty)
    if BESIDE:
        column = tl.arange(0, 2 * H)
        b_both = tl.interleave(b_first, b_second)
        mask = live[:, None] & (column < 2 * PAIRS)[None, :]
        tl.store(p_out + i_out[:, None] + column[None, :], b_both, mask=mask)
    else:
        mask = live[:, None] & (pair < PAIRS)[None, :]
        low, high = pair, pair + PAIRS
        if ROTARY > 0 and ROTARY < 2 * PAIRS:
            low = tl.where(pair < ROTARY // 2, pair, pair + ROTARY // 2)
            high = tl.where(pair < ROTARY // 2, pair + ROTARY // 2, pair + PAIRS)
        tl.store(p_out + i_out[:, None] + low[None, :], b_first, mask=mask)
        tl.store(p_out + i_out[:, None] + high[None, :], b_second, mask=mask)


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
    live, tile, row, p_tile = _rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q, ROWS)
    b_token = row
    if CLASS_BITS > 0:
        b_token = _tokens_of(p_tile + i_group * class_stride if BY_GROUP else p_tile, row, K, CLASS_BITS)
    b_scale = _scales_of(p_tile, p_scales, tl.load(p_scale_at + i_part), row, SCALE_BITS) * tl.load(p_unit + i_part)
    b_low, b_high = tl.zeros([ROWS, H], tl.float32), tl.zeros([ROWS, H], tl.float32)
    pair = tl.arange(0, H)
    blocks = tl.cdiv(tl.load(p_slots + i_part * (E // 32 + 1) + E // 32), KB // 32)
    for block in range(blocks):
        slots = _slots_of(p_slots, i_part, block, E, KB)
        column = block * KB + tl.arange(0, KB)
        b_level = _levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E)
        i_matrix = ((i_part * E + column) * HEADS + i_head % HEADS)[:, None] * (2 * H) + pair[None, :]
        b_low = tl.dot(b_level, tl.load(p_matrix + i_matrix), b_low)
        b_high = tl.dot(b_level, tl.load(p_matrix + i_matrix + H), b_high)
    b_place = tile.to(tl.int64) * 64 + b_token
    i_out = (i_layer.to(tl.int64) * tokens + b_place) * (groups * HEADS * D) + i_head * D
    _store_turned(
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
    live, tile, row, p_tile = _rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q, ROWS)
    b_token = row
    if CLASS_BITS > 0:
        b_token = _tokens_of(p_tile + i_group * class_stride if BY_GROUP else p_tile, row, K, CLASS_BITS)
    b_scale = _scales_of(p_tile, p_scales, tl.load(p_scale_at + i_part), row, SCALE_BITS) * tl.load(p_unit + i_part)
    i_row = (tl.program_id(2) * groups + i_group).to(tl.int64) * tokens + tile.to(tl.int64) * 64 + b_token
    for block in range(E // KB):
        slots = _slots_of(p_slots, i_part, block, E, KB)
        column = block * KB + tl.arange(0, KB)
        b_level = _levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E)
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
    _store_turned(
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
