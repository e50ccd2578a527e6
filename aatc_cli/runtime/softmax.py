"""A softmax that is fed a few tokens at a time: running maximum, normaliser and weighted sum of values."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.attend import cap_scores
from aatc_cli.core.casting import saturated
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.store import LayerView


class OnlineSoftmax:
    """Running maximum, normaliser and weighted sum of values for queries folded to [b, H, M, D], M = group * q."""

    def __init__(self, query: Tensor, heads: int, first: int, view: LayerView) -> None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, all_heads, self.count, dim = query.shape
        self.shape = query.shape
        self.query = query.reshape(batch, heads, all_heads // heads * self.count, dim).to(dtype) * view.scaling
        self.view, self.first, self.sliding_window = view, first, view.sliding_window
        self.peak = self.query.new_full((*self.query.shape[:3], 1), -torch.inf)
        self.norm = torch.zeros_like(self.peak)
        self.total = torch.zeros_like(self.query)

    def sees(self, token: int) -> bool:
        """Whether any query reaches back to ``token``."""
        return self.sliding_window is None or self.first - token < self.sliding_window

    def weigh(self, keys: Tensor, first: int, dropped: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Unnormalised weights [b, H, M, n] of rotated keys [b, H, n, D], the factor older sums fade by, their sum.

        dropped [b, H, n]: true where a head keeps nothing of a token.
        """
        scores = self._scores(keys, first, dropped)
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # a query that has seen nothing yet has no maximum to subtract
        reference = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
        fade = torch.exp(self.peak - reference)
        weights = (scores - reference).exp_()
        self.peak = peak
        mass = weights.sum(-1, keepdim=True)
        self.norm = self.norm * fade + mass
        self.total = self.total * fade
        return weights, fade, mass

    def shares(self, keys: Tensor, first: int) -> Tensor:
        """Weights [b, H, M, n] of rotated keys that were taken in, of all that was; after `result`."""
        return torch.exp(self._scores(keys, first, None) - self.peak) / self.norm

    def add(self, keys: Tensor, values: Tensor, first: int, dropped: Tensor | None = None) -> None:
        """Take in rotated keys and values [b, H, n, D] of the tokens from ``first`` on."""
        if self.sees(first + keys.shape[2] - 1):
            weights, _, _ = self.weigh(keys, first, dropped)
            self.total = self.total + weights @ values.to(weights.dtype)

    def rows(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Take in exact rows [b, n, C], keys before RoPE, of the tokens from ``first`` on; there may be none."""
        if keys.shape[1]:
            heads = self.total.shape[1]
            cos, sin = self.view.tables(first, keys.shape[1])
            rotated = apply_rope(by_head(keys, heads), cos[None], sin[None], self.view.rope)
            self.add(rotated, by_head(values, heads), first)

    def sink(self, logits: Tensor) -> None:
        """Take in one more logit per query head [Hq] that has no value."""
        scores = logits.to(self.norm.dtype).view(self.norm.shape[1], -1, 1).expand(-1, -1, self.count)
        scores = scores.reshape(1, self.norm.shape[1], -1, 1)
        peak = torch.maximum(self.peak, scores)
        fade = torch.exp(self.peak - peak)
        self.norm, self.total, self.peak = self.norm * fade + torch.exp(scores - peak), self.total * fade, peak

    def result(self, dtype: torch.dtype) -> Tensor:
        """The weighted means, the layer's own sinks counted, as [b, Hq, q, D] in ``dtype``."""
        if self.view.sinks is not None:
            self.sink(self.view.sinks)
        return saturated((self.total / self.norm).reshape(self.shape), dtype)

    def _scores(self, keys: Tensor, first: int, dropped: Tensor | None) -> Tensor:
        """Scores [b, H, M, n], -inf where a query must not see or a head does not keep a token."""
        scores = cap_scores(self.query @ keys.to(self.query.dtype).transpose(-1, -2), self.view.softcap)
        hidden = self._hidden(first, keys.shape[2])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores if dropped is None else scores.masked_fill(dropped[:, :, None], -torch.inf)

    def _hidden(self, first: int, count: int) -> Tensor | None:
        """Mask [M, n] of keys a query must not see: later ones, and those beyond the sliding window."""
        behind = first + count - 1 > self.first
        beyond = self.sliding_window is not None and self.first + self.count - 1 - first >= self.sliding_window
        if not (behind or beyond):
            return None
        device = self.query.device
        distance = (self.first + torch.arange(self.count, device=device))[:, None] - first
        distance = distance - torch.arange(count, device=device)
        hidden = distance < 0
        if self.sliding_window is not None:
            hidden |= distance >= self.sliding_window
        return hidden.repeat(self.query.shape[2] // self.count, 1)


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows [b, n, C] as [b, H, n, D]."""
    return torch.unflatten(rows, -1, (heads, -1)).transpose(1, 2)
