"""Which of the candidates stay: the best of every head, or the best of all heads of a layer or of a model.

Orders are total: among equal scores the later token stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kept_count(tokens: int, share: float) -> int:
    """Tokens that a head keeps of ``tokens`` packed ones, on average over the heads that share: never more than said.

    The least number above zero that floats cannot tell from a whole one is that one.
    """
    return min(math.floor(tokens * share + 1e-9), tokens)


def best(scores: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """The ``counts`` [B, H] best candidates of every head. scores, candidates [B, H, T] -> mask [B, H, T]."""
    return (_ranks(scores, candidates) < counts[..., None]) & candidates


def share_out(scores: Tensor, candidates: Tensor, count: int, floor: float) -> Tensor:
    """Tokens of every head where a layer's heads share ``count`` each: [B, H], by score over all heads.

    Every head keeps ``floor`` of an even share first (AdaKV's safeguard, 2407.11550).
    """
    batch, heads, length = scores.shape
    safe = _ranks(scores, candidates) < math.floor(count * floor)
    raised = torch.where(safe & candidates, torch.full_like(scores, torch.inf), scores)
    total = torch.full((batch, 1), count * heads, device=scores.device)
    chosen = best(raised.reshape(batch, 1, -1), candidates.reshape(batch, 1, -1), total)
    return chosen.view(batch, heads, length).sum(-1)


def share_over_layers(scores: Sequence[Tensor], candidates: Tensor, count: int) -> list[Tensor]:
    """Masks [B, H, T] of every layer where all heads of all layers share ``count`` tokens each, by score alone.

    scores [B, H, T] of every layer; candidates [B, H, T] are the same in all of them.
    """
    joined = torch.cat(list(scores), 1)
    batch, heads, length = joined.shape
    where = candidates.repeat(1, len(scores), 1)
    total = torch.full((batch, 1), count * heads, device=joined.device)
    chosen = best(joined.reshape(batch, 1, -1), where.reshape(batch, 1, -1), total)
    return list(chosen.view(batch, heads, length).chunk(len(scores), 1))


def _ranks(scores: Tensor, candidates: Tensor) -> Tensor:
    """Rank of every token of a head, the best 0, all that are no candidates behind."""
    hidden = torch.where(candidates, scores, torch.full_like(scores, -torch.inf))
    # candidates of the lowest score there is still come before what is none
    order = torch.argsort(hidden.flip(-1), dim=-1, descending=True, stable=True)
    order = scores.shape[-1] - 1 - order
    first = torch.argsort((~candidates).gather(-1, order).to(torch.int8), dim=-1, stable=True)
    order = order.gather(-1, first)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
