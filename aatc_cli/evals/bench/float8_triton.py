"""Split-KV decode attention over an e4m3 cache in Triton; import it only where Triton is installed.

Names: i_ an index, p_ a pointer, b_ a block of values; M query rows of a kv head, padded; DP the head dim, padded.
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
def split_kernel(
    p_query,
    p_keys,
    p_values,
    p_key_scale,
    p_lengths,
    p_part,
    p_stat,
    scaling,
    capacity,
    span,
    kv_heads,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """Sums of one split of one kv head, not normalised. Grid (B H, splits); ``span`` tokens a split, whole blocks.

    query [B, H G, D]; keys, values e4m3 [B, H, capacity, D]; part float32 [B H, splits, G, D]; stat float32
    [B H, splits, G, 2]: maximum in log2, and sum of the weights.
    """
    i_head, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, row = tl.arange(0, DP), tl.arange(0, M)
    inside = (row[:, None] < G) & (d[None, :] < D)
    b_query = tl.load(p_query + (i_head * G + row[:, None]) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    # against its own largest element, so that 8 bits are used and 16 do not overflow
    unit = tl.maximum(tl.max(tl.abs(b_query), 1), 1e-20) / LARGEST
    b_query = (b_query / unit[:, None]).to(KEY_TYPE)
    factor = unit * scaling * tl.load(p_key_scale + i_head)
    length = tl.load(p_lengths + i_head // kv_heads)
    start = i_split * span
    stop = tl.minimum(start + span, length)
    token = tl.arange(0, BLOCK)
    peak = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    if TOKENS_FIRST:
        b_turned = tl.trans(b_query)
        b_total = tl.zeros([DP, M], tl.float32)
    else:
        b_total = tl.zeros([M, DP], tl.float32)
    p_keys += i_head * capacity * D
    p_values += i_head * capacity * D
    for first in range(start, stop, BLOCK):
        here = first + token
        if TOKENS_FIRST:
            # tokens are the 64 rows or more that a warpgroup's product wants; both operands of the first stay e4m3
            place = here[:, None] * D + d[None, :]
            known = (here[:, None] < stop) & (d[None, :] < D)
            b_keys = tl.load(p_keys + place, mask=known, other=0.0)
            b_score = tl.dot(b_keys.to(KEY_TYPE), b_turned) * factor[None, :]
            b_score = tl.where(here[:, None] < stop, b_score, float("-inf"))
            higher = tl.maximum(peak, tl.max(b_score, 0))
            b_weight = tl.exp2(b_score - higher[None, :])
            fade = tl.exp2(peak - higher)
            norm = norm * fade + tl.sum(b_weight, 0)
            b_values = tl.load(p_values + place, mask=known, other=0.0)
            b_total = b_total * fade[None, :]
            b_total = tl.dot(tl.trans(b_values.to(VALUE_TYPE)), b_weight.to(VALUE_TYPE), b_total)
        else:
            known = (d[:, None] < D) & (here[None, :] < stop)
            b_keys = tl.load(p_keys + here[None, :] * D + d[:, None], mask=known, other=0.0)
            b_score = tl.dot(b_query, b_keys.to(KEY_TYPE)) * factor[:, None]
            b_score = tl.where(here[None, :] < stop, b_score, float("-inf"))
            higher = tl.maximum(peak, tl.max(b_score, 1))
            b_weight = tl.exp2(b_score - higher[:, None])
            fade = tl.exp2(peak - higher)
            norm = norm * fade + tl.sum(b_weight, 1)
            known = (here[:, None] < stop) & (d[None, :] < D)
            b_values = tl.load(p_values + here[:, None] * D + d[None, :], mask=known, other=0.0)
            b_total = tl.dot(b_weight.to(VALUE_TYPE), b_values.to(VALUE_TYPE), b_total * fade[:, None])
        peak = higher
    if TOKENS_FIRST:
        b_total = tl.trans(b_total)
    place = (i_head * tl.num_programs(1) + i_split) * G + row
    tl.store(p_part + place[:, None] * D + d[None, :], b_total, mask=inside)
    tl.store(p_stat + 2 * place, peak, mask=row < G)
    tl.store(p_stat + 2 * place + 1, norm, mask=row < G)


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(
    p_part, p_stat, p_value_scale, p_out, splits, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr
):
    """One query head's output from its splits. Grid (B H, G); S is the number of splits, padded."""
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, S), tl.arange(0, DP)
    place = (i_head * splits + split) * G + i_row
    peak = tl.load(p_stat + 2 * place, mask=split < splits, other=float("-inf"))
    norm = tl.load(p_stat + 2 * place + 1, mask=split < splits, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    whole = tl.sum(weight * norm, 0)
    inside = (split[:, None] < splits) & (d[None, :] < D)
    b_part = tl.load(p_part + place[:, None] * D + d[None, :], mask=inside, other=0.0)
    b_out = tl.sum(b_part * weight[:, None], 0) * tl.load(p_value_scale + i_head) / whole
    p_row = p_out + (i_head * G + i_row) * D + d
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=d < D)
