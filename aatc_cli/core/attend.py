"""Attention over keys that a mask allows, with what some models add to the softmax: sinks and a cap on scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor | None,
    scaling: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of ``query`` [B, J, T, D] over ``keys``, ``values`` [B, H, S, D] where ``allowed`` [T, S] is true.

    allowed None lets every query see every key; [B, J, T, S] says it for each head. sinks [J]: a logit per query head
    that takes part in the softmax and has no value. softcap c: scores s become c tanh(s / c). -> [B, J, T, D].
    """
    if sinks is None and softcap is None:
        if allowed is not None and query.is_cuda:
            # not every fused kernel that takes a mask knows grouped heads; without one, scores in float32 are stored
            share = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(share, 1) if share > 1 else x for x in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=True)
    weights = attention_weights(query, keys, allowed, scaling, sinks=sinks, softcap=softcap)
    return weighted_values(weights, values).to(query.dtype)


def attention_with_sums(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, causal: bool = True
) -> tuple[Tensor, Tensor] | None:
    """Attention [B, J, T, D] of T tokens to themselves and the logarithms [B, J, T] of what weights are over.

    causal False: to all keys [B, H, S, D] there are.

    One call of a fused kernel on a GPU, which knows both; None where there is none for these numbers.
    """
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    share = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(share, 1) if share > 1 else x for x in (keys, values))
    given, scale = (query, keys, values), {"scale": scaling}
    if query.dtype == torch.float32:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(*given, None, True, 0.0, causal, **scale)
        return found[0], found[1][..., : query.shape[2]]
    try:
        # faster than the other where there is one for this GPU and these heads
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, causal, False, **scale)
    except RuntimeError:
        found = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, **scale)
    return found[0], found[1].reshape(query.shape[:3])


def attention_weights(
    query: Tensor,
    keys: Tensor,
    allowed: Tensor | None,
    scaling: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The weights behind `masked_attention`, in float32 at least. -> [B, J, T, S]."""
    heads = keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    folded = torch.unflatten(query, 1, (heads, -1)).to(dtype)
    # query heads of one kv head are rows of one product, so that no key is copied for each of them
    products = folded.flatten(2, 3) @ keys.to(dtype).transpose(-1, -2) * scaling
    scores = cap_scores(products.view(*folded.shape[:4], keys.shape[2]), softcap)
    if allowed is not None:
        allowed = torch.unflatten(allowed, 1, (heads, -1)) if allowed.dim() == 4 else allowed
        scores = scores.masked_fill(~allowed, -torch.inf)
    return softmax_with_sinks(scores, None if sinks is None else sinks.view(heads, -1, 1, 1)).flatten(1, 2)


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of ``values`` [B, H, S, D] by ``weights`` [B, J, T, S], in the dtype of the weights. -> [B, J, T, D]."""
    batch, heads = values.shape[:2]
    rows = weights.reshape(batch, heads, -1, weights.shape[3]) @ values.to(weights.dtype)
    return rows.view(*weights.shape[:3], values.shape[3])


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores s as c tanh(s / c), or as they are without a cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension and one more logit, ``sinks``, whose weight is dropped. Same shape as scores."""
    if sinks is None:
        return scores.softmax(-1)
    joined = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return joined.softmax(-1)[..., :-1]


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T] of what token t (row) sees: itself and earlier tokens, at most ``window`` of them."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
