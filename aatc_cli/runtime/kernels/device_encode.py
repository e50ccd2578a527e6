"""Latents to tiles of stored chunks on a GPU, in Triton; import it only where Triton is installed.

`search_kernel` finds the token scale and the codes of the tokens of one class of one tile of one head group,
`pack_kernel` puts them into the planes of the tile. Names: i_ an index, p_ a pointer, b_ a block of values.
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
def _held(b_scale, p_scales, STEPS: tl.constexpr, ONE: tl.constexpr, SCALE_BITS: tl.constexpr):
    """A scale as tiles hold it, and its code."""
    b_half = tl.minimum(b_scale, 65504.0).to(tl.float16)
    b_wide = b_half.to(tl.float32)
    if SCALE_BITS == 16:
        b_code = b_half.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        b_code = tl.floor(tl.log2(tl.maximum(b_wide, 1e-30)) * STEPS + 0.5).to(tl.int32) + ONE
        b_code = tl.where(b_wide > 0, tl.minimum(tl.maximum(b_code, 1), (1 << SCALE_BITS) - 1), 0)
        b_wide = tl.load(p_scales + b_code)
    return b_wide, b_code


@triton.jit
def _nearest(b_size, b_start, b_half, p_edges, steps):
    """Index of the magnitude nearest to sizes [ROWS, n], of channels with ``half`` magnitudes from ``start`` on."""
    b_index = (b_size * 0).to(tl.int32)
    for step in range(steps):
        b_next = b_index + (1 << (steps - 1 - step))
        b_inside = b_next < b_half[None, :]
        b_edge = tl.load(p_edges + b_start[None, :] + b_next - 1, mask=b_inside, other=0.0)
        b_index = tl.where(b_inside & (b_size > b_edge), b_next, b_index)
    return b_index


@triton.jit
def search_kernel(
    p_latent,
    p_order,
    p_start,
    p_half,
    p_price,
    p_steps,
    p_count,
    p_edges,
    p_sizes,
    p_factors,
    p_scales,
    p_code,
    p_scale,
    tokens,
    groups,
    first,
    K0: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    BY_GROUP: tl.constexpr,
    STEPS: tl.constexpr,
    ONE: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KB: tl.constexpr,
):
    """Rows K0 .. K0 + Q of every tile. Grid (tiles, groups, layers from ``first`` on).

    latent [layers, groups, tokens, E] in the units of a channel; order [layers, orders, tokens]: the token of a tile in
    every row. Tables [L, groups, E]: start and half of a channel's magnitudes, price of its squared error; steps
    [L, groups, E / 32] of the search; count [L, groups] of channels with bits. edges, sizes: between magnitudes, and
    those. Writes code [layers, groups, tokens, E] by row, and the codes of scales [layers, groups, tokens].
    """
    i_tile, i_group, i_layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_part = ((i_layer + first) * groups + i_group).to(tl.int64)
    i_base = (i_layer * groups + i_group).to(tl.int64) * tokens + i_tile * 64
    row = K0 + tl.arange(0, Q)
    i_order = i_layer * tokens + i_tile * 64
    if BY_GROUP:
        i_order = i_base
    i_row = (i_base + tl.load(p_order + i_order + row))[:, None] * E
    b_energy = tl.zeros([Q], tl.float32)
    for block in range(E // KB):
        column = block * KB + tl.arange(0, KB)
        b_coded = tl.load(p_half + i_part * E + column) > 0
        b_unit = tl.where(b_coded[None, :], tl.load(p_latent + i_row + column[None, :]), 0.0)
        b_energy += tl.sum(b_unit * b_unit, 1)
    b_rms = tl.sqrt(b_energy / tl.maximum(tl.load(p_count + i_part), 1).to(tl.float32))
    candidate = tl.arange(0, CANDIDATES)
    b_error = tl.zeros([Q, CANDIDATES], tl.float32)
    for block in range(E // KB):
        column = block * KB + tl.arange(0, KB)
        b_start, b_half = tl.load(p_start + i_part * E + column), tl.load(p_half + i_part * E + column)
        b_price = tl.load(p_price + i_part * E + column)
        steps = tl.load(p_steps + i_part * (E // KB) + block)
        b_size = tl.abs(tl.load(p_latent + i_row + column[None, :]))
        for index in tl.static_range(CANDIDATES):
            b_scale, _ = _held(b_rms * tl.load(p_factors + index), p_scales, STEPS, ONE, SCALE_BITS)
            b_safe = tl.where(b_scale > 0, b_scale, 1.0)
            b_index = _nearest(b_size / b_safe[:, None], b_start, b_half, p_edges, steps)
            b_near = tl.load(p_sizes + b_start[None, :] + b_index) * b_scale[:, None] - b_size
            b_sum = tl.sum(b_near * b_near * b_price[None, :], 1)
            b_error += tl.where(candidate[None, :] == index, b_sum[:, None], 0.0)
    b_best = tl.argmin(b_error, 1)
    b_scale, b_held = _held(b_rms * tl.load(p_factors + b_best), p_scales, STEPS, ONE, SCALE_BITS)
    tl.store(p_scale + i_base + row, b_held)
    b_safe = tl.where(b_scale > 0, b_scale, 1.0)
    for block in range(E // KB):
        column = block * KB + tl.arange(0, KB)
        b_start, b_half = tl.load(p_start + i_part * E + column), tl.load(p_half + i_part * E + column)
        steps = tl.load(p_steps + i_part * (E // KB) + block)
        b_unit = tl.load(p_latent + i_row + column[None, :])
        b_index = _nearest(tl.abs(b_unit) / b_safe[:, None], b_start, b_half, p_edges, steps)
        b_code = tl.where(b_unit > 0, b_half[None, :] + b_index, b_half[None, :] - 1 - b_index)
        b_code = tl.where(b_half[None, :] > 0, b_code, 0)
        tl.store(p_code + (i_base + row)[:, None] * E + column[None, :], b_code.to(tl.uint8))


@triton.jit
def pack_kernel(
    p_code,
    p_scale,
    p_channel,
    p_shift,
    p_at,
    p_planes,
    p_scale_at,
    p_layer,
    p_nbytes,
    p_out,
    tokens,
    groups,
    first,
    K0: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    PLANES: tl.constexpr,
    SCALE_BITS: tl.constexpr,
):
    """Rows K0 .. K0 + Q of every tile into planes. Grid (tiles, groups, layers from ``first`` on).

    Tables: channel (-1 of none), shift [L, groups, PLANES, 16] of the digits of planes; at [L, groups, PLANES]: where
    they lie in a tile; planes [L, groups, 2]: of two bits, and all. layer, nbytes [L]: where a layer's tiles begin in
    ``out``, and how many bytes each has.
    """
    i_tile, i_group, i_layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_part = ((i_layer + first) * groups + i_group).to(tl.int64)
    i_base = (i_layer * groups + i_group).to(tl.int64) * tokens + i_tile * 64 + K0
    row, digit = tl.arange(0, Q), tl.arange(0, 16)
    p_tile = p_out + tl.load(p_layer + i_layer + first)
    p_tile += i_tile.to(tl.int64) * tl.load(p_nbytes + i_layer + first)
    twos, every = tl.load(p_planes + 2 * i_part), tl.load(p_planes + 2 * i_part + 1)
    for plane in range(every):
        i_digit = (i_part * PLANES + plane) * 16 + digit
        b_channel = tl.load(p_channel + i_digit)
        b_code = tl.load(
            p_code + (i_base + row)[:, None] * E + b_channel[None, :], mask=(b_channel >= 0)[None, :], other=0
        ).to(tl.int32)
        bits = tl.where(plane < twos, 2, 1)
        b_digit = (b_code >> tl.load(p_shift + i_digit)[None, :]) & (2 * bits - 1)
        b_word = tl.sum(b_digit << (bits * digit)[None, :], 1)
        p_word = p_tile + tl.load(p_at + i_part * PLANES + plane) + row * (2 * bits)
        for byte in tl.static_range(4):
            b_byte = ((b_word >> (8 * byte)) & 255).to(tl.uint8)
            tl.store(p_word + byte, b_byte, mask=(row >= 0) & (byte < 2 * bits))
    i_scale = tl.load(p_scale_at + i_part)
    if i_scale >= 0:
        if SCALE_BITS == 4:
            pair = tl.arange(0, Q // 2)
            b_low = tl.load(p_scale + i_base + 2 * pair) & 15
            b_high = tl.load(p_scale + i_base + 2 * pair + 1) & 15
            tl.store(p_tile + i_scale + pair, (b_low | (b_high << 4)).to(tl.uint8))
        elif SCALE_BITS == 8:
            tl.store(p_tile + i_scale + row, (tl.load(p_scale + i_base + row) & 255).to(tl.uint8))
        else:
            b_scale = tl.load(p_scale + i_base + row)
            tl.store(p_tile + i_scale + 2 * row, (b_scale & 255).to(tl.uint8))
            tl.store(p_tile + i_scale + 2 * row + 1, ((b_scale >> 8) & 255).to(tl.uint8))
