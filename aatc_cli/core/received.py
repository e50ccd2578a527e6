"""The attention a token receives while it is exact: what ranks it in its tile.

    r_i = sum over the queries t with first <= t - i <= last, and over the query heads of a kv head, of a_ti^2

All those queries read token i exactly, so r_i is known when the token leaves the window and nothing later can change
it (`core.tile_classes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_weights
from aatc_cli.core.tensor_cores import wide_products

# queries at a time, and attention weights that a GPU may hold at once
_QUERIES = 64
_WEIGHTS = 1 << 26


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


def _at_once(query: Tensor) -> int:
    """Queries at a time: few on a CPU, whose caches are small; a GPU waits for every launch, so more of them."""
    batch, heads, length, _ = query.shape
    if query.device.type == "cpu":
        return _QUERIES
    return max(_QUERIES, min(4 * _QUERIES, _WEIGHTS // (batch * heads * length)))
