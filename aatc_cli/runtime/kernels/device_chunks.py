"""Tiles of stored chunks to pages on a GPU, in Triton; import it only where Triton is installed.

One program decodes the tokens of one class of one tile of one head group of one layer. Names: i_ an index, p_ a
pointer, b_ a block of values. Keys are rotated by a second product, with a matrix whose columns are turned.
"""

# Triton reads the annotations of a kernel: only its constants have any
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

# annotations stay objects: the interpreter looks for tl.constexpr among them
from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit  # type: ignore[untyped-decorator]
def chunk_kernel(
    p_data,
    p_chunk,
    p_layer,
    p_nbytes,
    p_slot_at,
    p_slot_how,
    p_level_at,
    p_levels,
    p_scale_at,
    p_scales,
    p_decode,
    p_turned,
    p_bias,
    p_bias_turned,
    p_cos,
    p_sin,
    p_out,
    tiles,
    tokens,
    groups,
    class_stride,
    K: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASS_BITS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    TURN: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Class K of Q tokens. Grid (all tiles, groups, layers); ``tiles`` a chunk, ``tokens`` in all.

    data uint8; chunk [m], layer [L]: where the layers of a chunk begin, and a layer behind that; nbytes [L] of a tile.
    Tables of the class: slot_at, slot_how [L, groups, SLOTS, E], level_at [L, groups, E], scale_at [L, groups]. decode,
    turned [L, groups, E, E]; bias, bias_turned [L, groups, E]; cos, sin [tokens, D]; out [L, tokens, groups E].
    """
    i_tile, i_group, i_layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_part = (i_layer * groups + i_group).to(tl.int64)
    p_tile = p_data + tl.load(p_chunk + i_tile // tiles) + tl.load(p_layer + i_layer)
    p_tile += (i_tile % tiles).to(tl.int64) * tl.load(p_nbytes + i_layer)
    row, column, token = tl.arange(0, Q), tl.arange(0, E), tl.arange(0, 64)
    b_token = row
    if CLASS_BITS > 0:
        p_class = p_tile + i_group * class_stride if BY_GROUP else p_tile
        b_class = tl.zeros([64], tl.int32)
        for bit in tl.static_range(CLASS_BITS):
            b_byte = tl.load(p_class + bit * 8 + token // 8).to(tl.int32)
            b_class += ((b_byte >> (token % 8)) & 1) << bit
        b_mine = (b_class == K).to(tl.int32)
        b_rank = tl.cumsum(b_mine, 0) - b_mine
        b_hit = (b_rank[None, :] == row[:, None]) & (b_mine[None, :] > 0)
        b_token = tl.sum(tl.where(b_hit, token[None, :], 0), 1)
    b_code = tl.zeros([Q, E], tl.int32)
    for slot in tl.static_range(SLOTS):
        i_slot = (i_part * SLOTS + slot) * E + column
        b_how = tl.load(p_slot_how + i_slot)
        b_at = tl.load(p_slot_at + i_slot)[None, :] + row[:, None] * ((b_how >> 12) & 7)[None, :]
        b_used = ((b_how >> 8) & 3)[None, :]
        b_byte = tl.load(p_tile + b_at, mask=b_used > 0, other=0).to(tl.int32)
        b_code |= ((b_byte >> (b_how & 7)[None, :]) & b_used) << ((b_how >> 3) & 15)[None, :]
    b_latent = tl.load(p_levels + tl.load(p_level_at + i_part * E + column)[None, :] + b_code)
    i_scale = tl.load(p_scale_at + i_part)
    p_scale = p_tile + tl.maximum(i_scale, 0)
    if SCALE_BITS == 8:
        b_index = tl.load(p_scale + row).to(tl.int32)
    elif SCALE_BITS == 16:
        b_index = tl.load(p_scale + 2 * row).to(tl.int32) | (tl.load(p_scale + 2 * row + 1).to(tl.int32) << 8)
    else:
        b_index = (tl.load(p_scale + row // 2).to(tl.int32) >> (4 * (row % 2))) & 15
    b_scale = tl.where(i_scale >= 0, tl.load(p_scales + b_index), 0.0)
    b_latent *= b_scale[:, None]
    i_matrix = i_part * E * E + column[:, None] * E + column[None, :]
    b_rows = tl.dot(b_latent, tl.load(p_decode + i_matrix), input_precision="tf32")
    if BIAS:
        b_rows += tl.load(p_bias + i_part * E + column)[None, :]
    b_place = i_tile.to(tl.int64) * 64 + b_token
    if TURN:
        b_turned = tl.dot(b_latent, tl.load(p_turned + i_matrix), input_precision="tf32")
        if BIAS:
            b_turned += tl.load(p_bias_turned + i_part * E + column)[None, :]
        i_angle = b_place[:, None] * D + (column % D)[None, :]
        b_rows = b_rows * tl.load(p_cos + i_angle) + b_turned * tl.load(p_sin + i_angle)
    b_rows = tl.minimum(tl.maximum(b_rows, -LARGEST), LARGEST)
    i_out = (i_layer.to(tl.int64) * tokens + b_place[:, None]) * (groups * E) + i_group * E + column[None, :]
    tl.store(p_out + i_out, b_rows.to(p_out.dtype.element_ty))
