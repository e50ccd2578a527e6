"""Attention over keys that a mask allows, with what some models add to the softmax: sinks and a cap on scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None, scaling: float, *,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of ``query`` [B, J, T, D] over ``keys``, ``values`` [B, H, S, D] where ``allowed`` [T, S] is true.

    allowed None lets every query see every key. sinks [J]: a logit per query head that takes part in the softmax and
    has no value. softcap c: scores s become c tanh(s / c). -> [B, J, T, D].
    """
    if sinks is None and softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=True)
    heads = keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    folded = torch.unflatten(query, 1, (heads, -1)).to(dtype)
    scores = cap_scores(folded @ keys[:, :, None].to(dtype).transpose(-1, -2) * scaling, softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = softmax_with_sinks(scores, None if sinks is None else sinks.view(heads, -1, 1, 1))
    return (weights @ values[:, :, None].to(dtype)).flatten(1, 2).to(query.dtype)


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
