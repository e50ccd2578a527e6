"""The attention a token receives while it is exact: what ranks it in its tile.

    r_i = sum over the queries t with first <= t - i <= last, and over the query heads of a kv head, of a_ti^2

All those queries read token i exactly, so r_i is known when the token leaves the window and nothing later can change
it (`core.tile_classes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_weights, attention_with_sums
from aatc_cli.core.tensor_cores import wide_products

# queries at a time, and attention weights that a GPU may hold at once
_QUERIES = 64
_WEIGHTS = 1 << 26
# the sum of a query that is not there: its weights are zero, with nothing infinite on the way
_NEVER = 1e30


def received_by_head(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    lags: tuple[int, int],
    *,
    sliding: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """r of every token and kv head, of the queries at distances ``lags[0]`` .. ``lags[1]``. -> [B, H, T].

    From causal attention of ``query`` [B, J, T, D] over exact ``keys`` [B, H, T, D]. Queries go a few at a time, so
    that no [T, T] is ever held.
    """
    batch, length, heads = query.shape[0], query.shape[2], keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(batch, heads, length, dtype=dtype, device=query.device)
    places = torch.arange(length, device=query.device)
    first, last = lags
    step = _at_once(query)
    for start in range(0, length, step):
        end = min(start + step, length)
        lag = places[start:end, None] - places[:end]
        allowed = (lag >= 0) if sliding is None else (lag >= 0) & (lag < sliding)
        with wide_products(query):
            weights = attention_weights(
                query[:, :, start:end], keys[:, :, :end], allowed, scaling, sinks=sinks, softcap=softcap
            )
        band = slice(max(start - last, 0), max(end - first, 0))
        watched = (lag[:, band] >= first) & (lag[:, band] <= last)
        by_head = torch.unflatten(weights[..., band], 1, (heads, -1))
        total[..., band] += (by_head * watched).square().sum((2, 3))
    return total


def received_within(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    lags: tuple[int, int],
    *,
    sliding: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`received_by_head` of tokens whose attention a GPU has a fused kernel for, which is asked for the sums first."""
    plain = sliding is None and sinks is None and softcap is None
    found = attention_with_sums(query, keys, values, scaling) if plain else None
    if found is None:
        return received_by_head(query, keys, scaling, lags, sliding=sliding, sinks=sinks, softcap=softcap)
    near = lags[1] - lags[0] <= 4 * _QUERIES
    return (received_near if near else received_far)(query, keys, found[1], scaling, lags)


def received_far(query: Tensor, keys: Tensor, sums: Tensor, scaling: float, lags: tuple[int, int]) -> Tensor:
    """As `received_near`, for distances that are many: squares of weights are exp(2 (score - sum))."""
    batch, length, heads = query.shape[0], query.shape[2], keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(batch, heads, length, dtype=dtype, device=query.device)
    places = torch.arange(length, device=query.device)
    grouped, paid = torch.unflatten(query, 1, (heads, -1)), torch.unflatten(sums, 1, (heads, -1))
    first, last = lags
    step = _at_once(query)
    for start in range(0, length, step):
        end = min(start + step, length)
        band = slice(max(start - last, 0), max(end - first, 0))
        if band.stop <= band.start:
            continue
        lag = places[start:end, None] - places[band]
        least = paid[..., start:end].to(dtype).flatten(0, 1).flatten(1)[..., None]
        rows = grouped[..., start:end, :].to(dtype).flatten(0, 1).flatten(1, 2)
        seen = keys[:, :, band].to(dtype).flatten(0, 1).transpose(-1, -2)
        with wide_products(query):
            squares = torch.baddbmm(least, rows, seen, beta=-2.0, alpha=2.0 * scaling).exp_()
        squares = squares.view(batch, heads, -1, end - start, band.stop - band.start)
        total[..., band] += squares.masked_fill_((lag < first) | (lag > last), 0.0).sum((2, 3))
    return total


def received_near(query: Tensor, keys: Tensor, sums: Tensor, scaling: float, lags: tuple[int, int]) -> Tensor:
    """`received_by_head` where the logarithm of what every query's softmax divides by is known: sums [B, J, T].

    So only the keys at the distances that count are multiplied: n queries with the n + lags[1] - lags[0] keys that any
    of them counts for.
    """
    batch, length, heads = query.shape[0], query.shape[2], keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    (first, last), blocks = lags, -(-length // _QUERIES)
    span, room = _QUERIES + last - first, blocks * _QUERIES - length
    # behind the last query there is none that pays anything
    queries = torch.nn.functional.pad(torch.unflatten(query, 1, (heads, -1)), (0, 0, 0, room))
    paid = torch.nn.functional.pad(torch.unflatten(sums, 1, (heads, -1)), (0, room), value=_NEVER)
    near = torch.nn.functional.pad(keys, (0, 0, last, max(room - first, 0)))
    place = torch.arange(_QUERIES, device=query.device)[:, None] + last - torch.arange(span, device=query.device)
    unwatched = (place < first) | (place > last)
    total = torch.zeros(batch, heads, last + blocks * _QUERIES + span, dtype=dtype, device=query.device)
    step = max(1, _WEIGHTS // (batch * query.shape[1] * _QUERIES * span))
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        rows = slice(start * _QUERIES, stop * _QUERIES)
        mine = torch.unflatten(queries[..., rows, :].to(dtype), 3, (-1, _QUERIES)).transpose(2, 3)
        theirs = near[:, :, rows.start : rows.stop - _QUERIES + span].to(dtype).unfold(2, span, _QUERIES)
        # squares of weights, exp(2 (score - sum)): the sums go in with the product
        least = torch.unflatten(paid[..., rows].to(dtype), 3, (-1, _QUERIES)).transpose(2, 3).flatten(3)[..., None]
        flat = (x.flatten(0, 2) for x in (least.expand(*least.shape[:-1], span), mine.flatten(3, 4), theirs))
        with wide_products(query):
            weights = torch.baddbmm(*flat, beta=-2.0, alpha=2.0 * scaling).exp_()
        weights = weights.view(batch, heads, stop - start, -1, _QUERIES, span)
        found = weights.masked_fill_(unwatched, 0.0).sum((3, 4))
        places = torch.arange(start, stop, device=query.device)[:, None] * _QUERIES
        places = places + torch.arange(span, device=query.device)
        total.index_add_(2, places.flatten(), found.flatten(2))
    return total[..., last : last + length]


def _at_once(query: Tensor) -> int:
    """Queries at a time: few on a CPU, whose caches are small; a GPU waits for every launch, so more of them."""
    batch, heads, length, _ = query.shape
    if query.device.type == "cpu":
        return _QUERIES
    return max(_QUERIES, min(4 * _QUERIES, _WEIGHTS // (batch * heads * length)))
