"""What a prompt's tokens receive, their latents, and keys turned back, in Triton: import it only where Triton is.

`received_kernel` is `core.received.received_near` without what it writes on the way: a program has a block of keys of
one kv head and walks the queries at the distances that count. `parts_kernel` multiplies rows with matrices in parts,
`back_kernel` takes the rotation off rotated keys. Names: i_ an index, p_ a pointer, b_ a block of values.
"""

# Triton reads the annotations of a kernel: only its constants have any
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# annotations stay objects: the interpreter looks for tl.constexpr among them
from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


# lengths change with every prompt: a kernel that were compiled for what divides them would be compiled at requests
@triton.jit(do_not_specialize=["queries", "keys", "before", "sums_head", "out_head"])
def received_kernel(
    p_query,
    p_keys,
    p_sums,
    p_out,
    queries,
    keys,
    before,
    doubled,
    query_token,
    query_head,
    key_token,
    key_head,
    sums_head,
    out_head,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of squared weights float32 [H, n] of rotated queries [q, Hq, D] and keys [n, H, D]. Grid (n / BLOCK, H).

    Query i is that of key ``before`` + i. sums [Hq, q]: natural logarithms of what the softmax of a query divides by.
    doubled: twice the scaling over ln 2. Strides are in numbers.
    """
    i_head = tl.program_id(1)
    b_key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D)
    p_key = p_keys + b_key[:, None].to(tl.int64) * key_token + i_head * key_head + channel[None, :]
    b_keys = tl.load(p_key, mask=(b_key < keys)[:, None], other=0.0)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for part in range((LAST - FIRST + 2 * BLOCK - 1) // BLOCK):
        b_query = tl.program_id(0) * BLOCK + FIRST - before + part * BLOCK + tl.arange(0, BLOCK)
        b_there = (b_query >= 0) & (b_query < queries)
        b_lag = before + b_query[None, :] - b_key[:, None]
        b_counts = (b_lag >= FIRST) & (b_lag <= LAST) & b_there[None, :]
        for member in range(GROUP):
            i_query = i_head * GROUP + member
            p_row = p_query + b_query[:, None].to(tl.int64) * query_token + i_query * query_head + channel[None, :]
            b_rows = tl.load(p_row, mask=b_there[:, None], other=0.0)
            b_total = tl.load(p_sums + i_query.to(tl.int64) * sums_head + b_query, mask=b_there, other=0.0)
            b_score = tl.dot(b_keys, tl.trans(b_rows)) * doubled - (2.0 * 1.4426950408889634) * b_total[None, :]
            b_sum += tl.sum(tl.where(b_counts, tl.exp2(b_score), 0.0), 1)
    tl.store(p_out + i_head * out_head + b_key, b_sum, mask=b_key < keys)


@triton.jit(do_not_specialize=["tokens"])
def parts_kernel(p_rows, p_parts, p_out, tokens, heads, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [n, H, D] times the sum of matrices [PARTS, H, D, D] of their type, the least last: float32 [n, H, D].

    Grid (n / BLOCK, H).
    """
    i_head = tl.program_id(1)
    b_token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    channel = tl.arange(0, D)
    p_row, live = (b_token * heads + i_head) * D + channel[None, :], b_token < tokens
    b_rows = tl.load(p_rows + p_row, mask=live, other=0.0)
    b_sum = tl.zeros([BLOCK, D], tl.float32)
    # sums lose least where the least goes first
    for part in tl.static_range(PARTS):
        p_part = p_parts + ((PARTS - 1 - part) * heads + i_head) * D * D
        b_sum = tl.dot(b_rows, tl.load(p_part + channel[:, None] * D + channel[None, :]), b_sum)
    tl.store(p_out + p_row, b_sum, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def back_kernel(p_keys, p_cos, p_sin, p_out, tokens, key_token, key_head, heads, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys [n, H, D] turned by cos and sin float32 [n, D] in float32, into [n, H D] of their type.

    Grid (n / BLOCK, H). What cos and sin are is up to the caller: those of `Turning.back` take a rotation off.
    """
    i_head = tl.program_id(1)
    b_token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    pair, live = tl.arange(0, D // 2)[None, :], b_token < tokens
    p_key = p_keys + b_token * key_token + i_head * key_head + pair
    b_low = tl.load(p_key, mask=live, other=0.0).to(tl.float32)
    b_high = tl.load(p_key + D // 2, mask=live, other=0.0).to(tl.float32)
    i_angle = b_token * D + pair
    b_cos, b_sin = tl.load(p_cos + i_angle, mask=live, other=0.0), tl.load(p_sin + i_angle, mask=live, other=0.0)
    b_first = b_low * b_cos - b_high * b_sin
    i_angle += D // 2
    b_cos, b_sin = tl.load(p_cos + i_angle, mask=live, other=0.0), tl.load(p_sin + i_angle, mask=live, other=0.0)
    b_second = b_high * b_cos + b_low * b_sin
    p_row = p_out + (b_token * heads + i_head) * D + pair
    tl.store(p_row, b_first.to(p_out.dtype.element_ty), mask=live)
    tl.store(p_row + D // 2, b_second.to(p_out.dtype.element_ty), mask=live)
