"""Which of the candidates stay: the best of every head, or the best of all heads of a layer or of a model.

Orders are total: among equal scores the later token stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kept_count(tokens: int, keep: float) -> int:
    """Tokens that a head keeps of ``tokens`` packed ones, on average over the heads that share: never more than said.

    keep: a share, or above 1 a number of tokens. The least number above zero that floats cannot tell from a whole one
    is that one.
    """
    return min(math.floor(keep if keep > 1 else tokens * keep + 1e-9), tokens)


def longest_share(keep: float) -> float:
    """The share of the tokens that stay of a text; of a number of tokens that of texts which are no longer: all."""
    return min(keep, 1.0)


def best(scores: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """The ``counts`` [B, H] best candidates of every head. scores, candidates [B, H, T] -> mask [B, H, T]."""
    return (_ranks(scores, candidates) < counts[..., None]) & candidates


def share_out(scores: Tensor, candidates: Tensor, count: int, floor: float, costs: Tensor | None = None) -> Tensor:
    """Tokens of every head where a layer's heads share ``count`` each: [B, H], by score over all heads.

    Every head keeps ``floor`` of an even share first (AdaKV's safeguard, 2407.11550). costs [H]: bytes of a token of
    each head, relative to the mean; the best are then taken as long as all their bytes are those of even shares.
    """
    safe = _ranks(scores, candidates) < math.floor(count * floor)
    raised = torch.where(safe & candidates, torch.full_like(scores, torch.inf), scores)
    return _shared(raised, candidates, count, costs).sum(-1)


def share_over_layers(
    scores: Sequence[Tensor], candidates: Tensor, count: int, costs: Tensor | None = None
) -> list[Tensor]:
    """Masks [B, H, T] of every layer where all heads of all layers share ``count`` tokens each, by score alone.

    scores [B, H, T] of every layer; candidates [B, H, T] are the same in all of them; costs [L H] as of `share_out`.
    """
    where = candidates.repeat(1, len(scores), 1)
    return list(_shared(torch.cat(list(scores), 1), where, count, costs).chunk(len(scores), 1))


def _shared(scores: Tensor, candidates: Tensor, count: int, costs: Tensor | None) -> Tensor:
    """The best candidates of all heads that together cost no more than ``count`` of each: mask [B, H, T]."""
    batch, heads, length = scores.shape
    ranks = _ranks(scores.reshape(batch, 1, -1), candidates.reshape(batch, 1, -1))[:, 0]
    each = torch.ones(heads) if costs is None else costs
    paid = each.to(scores.device, torch.float64).repeat_interleave(length).expand_as(ranks)
    order = torch.empty_like(ranks).scatter_(
        -1, ranks, torch.arange(heads * length, device=ranks.device).expand_as(ranks)
    )
    # what floats cannot tell from the whole sum is within it
    within = paid.gather(-1, order).cumsum(-1) <= count * float(paid[0].sum()) / length * (1 + 1e-9)
    return torch.empty_like(within).scatter_(-1, order, within).view(batch, heads, length) & candidates


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
