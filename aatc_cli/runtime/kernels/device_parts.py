"""What a program reads of a stored tile on a GPU and how it writes rows, in Triton; import it only where Triton is.

Names: i_ an index, p_ a pointer, b_ a block of values.
"""

# Triton reads the annotations of a kernel: only its constants have any
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# annotations stay objects: the interpreter looks for tl.constexpr among them
from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit
def rows_of(p_data, p_chunk, p_layer, p_nbytes, i_rows, i_layer, tiles, every, Q: tl.constexpr, ROWS: tl.constexpr):
    """What a program of ROWS tokens of a class reads: which are there, their tile, their number, where tiles begin."""
    place = i_rows * ROWS + tl.arange(0, ROWS)
    live = place // Q < every
    tile = tl.where(live, place // Q, 0)
    p_tile = p_data + tl.load(p_chunk + tile // tiles) + tl.load(p_layer + i_layer)
    return live, tile, place % Q, p_tile + (tile % tiles).to(tl.int64) * tl.load(p_nbytes + i_layer)


@triton.jit
def tokens_of(p_class, row, K: tl.constexpr, CLASS_BITS: tl.constexpr):
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
def slots_of(p_slots, i_part, block, E: tl.constexpr, KB: tl.constexpr):
    """The most digits that a channel of a block has."""
    p_first = p_slots + i_part * (E // 32 + 1) + block * (KB // 32)
    slots = tl.load(p_first)
    for part in tl.static_range(1, KB // 32):
        slots = tl.maximum(slots, tl.load(p_first + part))
    return slots


@triton.jit
def levels_of(p_tile, p_slot_at, p_slot_how, p_level_at, p_levels, row, column, i_part, slots, E: tl.constexpr):
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
def scales_of(p_tile, p_scales, i_scale, row, SCALE_BITS: tl.constexpr):
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
def store_turned(
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
