"""Attention of a few queries over one layer's store: exact sinks, packed tiles, exact window, under one softmax.

Packed keys are reconstructed, rotated and scored one tile at a time. Values are absorbed: the softmax weights sum
latents, and the decode matrix is applied to the sum once. No more history than one tile is ever in float.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aatc_cli.core.attend import cap_scores
from aatc_cli.core.rope import RopeStyle, apply_rope
from aatc_cli.runtime.store import LayerStore, PackedStream

TILE = 512

# cos and sin [n, R] of tokens first .. first + n - 1, in the model's dtype
Tables = Callable[[int, int], tuple[Tensor, Tensor]]


def cached_attention(
    query: Tensor, store: LayerStore, tables: Tables, scaling: float, *, sliding_window: int | None = None,
    fresh: tuple[Tensor, Tensor] | None = None, tile: int = TILE, rope: RopeStyle = "half",
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of rotated queries [b, Hq, q, D] over ``store`` and, causally, over ``fresh`` tokens behind it.

    fresh: rotated keys and values [b, H, q, D] of the queries' own tokens, not in the store yet; without it there is
    one query, that of the store's last token. ``tables`` gives the rotation of the store's tokens by index, ``rope``
    how pairs lie; sinks [Hq] and softcap are those of `core.attend.masked_attention`. The result [b, Hq, q, D] is in
    the query's dtype; sums run in float32, or float64 for a float64 model.
    """
    assert fresh is not None or query.shape[2] == 1
    heads = store.ring_keys.shape[2] // query.shape[3]
    last = store.tokens if fresh is not None else store.tokens - 1
    softmax = _OnlineSoftmax(query, heads, scaling, last, sliding_window, softcap)

    def exact(keys: Tensor, values: Tensor, first: int) -> None:
        if keys.shape[1]:
            cos, sin = tables(first, keys.shape[1])
            softmax.add(apply_rope(_by_head(keys, heads), cos[None], sin[None], rope), _by_head(values, heads), first)

    exact(store.sink_keys, store.sink_values, 0)
    for stream in store.streams:
        _add_stream(softmax, stream, tables, rope, query.dtype, max(tile // stream.flush, 1) * stream.flush)
    exact(*store.recent())
    if fresh is not None:
        softmax.add(*fresh, store.tokens)
    if sinks is not None:
        softmax.sink(sinks)
    return softmax.result().to(query.dtype)


def _add_stream(
    softmax: _OnlineSoftmax, stream: PackedStream, tables: Tables, rope: RopeStyle, dtype: torch.dtype, tile: int
) -> None:
    """Score a stream tile by tile, sum its value latents under the softmax, and decode the sum once."""
    site = stream.value_site
    batch, heads, rows, _ = softmax.total.shape
    share = heads // site.groups
    weighted = [softmax.query.new_zeros(batch, share, rows, columns.shape[0]) for columns in site.columns]
    weights = softmax.query.new_zeros(batch, heads, rows, 1)
    for start in range(0, stream.tokens, tile):
        stop = min(start + tile, stream.tokens)
        if not softmax.sees(stream.first + stop - 1):
            continue
        keys, key_scales, values, value_scales = stream.tile(start, stop)
        cos, sin = tables(stream.first + start, stop - start)
        rotated = apply_rope(_by_head(stream.key_site.keys(keys, key_scales, dtype), heads), cos[None], sin[None], rope)
        part, fade = softmax.weigh(rotated, stream.first + start)
        weights = weights * fade + part.sum(-1, keepdim=True)
        for group, latents in enumerate(site.value_latents(values)):
            mine = slice(group * share, (group + 1) * share)
            scaled = part[:, mine] * value_scales[:, group, None, None].to(part.dtype)
            weighted[group] = weighted[group] * fade[:, mine] + scaled @ latents.to(part.dtype)[:, None]
    if stream.tokens:
        softmax.total += site.values([total.to(site.dtype) for total in weighted], weights.to(site.dtype))


class _OnlineSoftmax:
    """Running maximum, normaliser and weighted sum of values for queries folded to [b, H, M, D], M = group * q."""

    def __init__(
        self, query: Tensor, heads: int, scaling: float, first: int, sliding_window: int | None, softcap: float | None
    ) -> None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, all_heads, self.count, dim = query.shape
        self.shape = query.shape
        self.query = query.reshape(batch, heads, all_heads // heads * self.count, dim).to(dtype) * scaling
        self.first, self.sliding_window, self.softcap = first, sliding_window, softcap
        self.peak = self.query.new_full((*self.query.shape[:3], 1), -torch.inf)
        self.norm = torch.zeros_like(self.peak)
        self.total = torch.zeros_like(self.query)

    def sees(self, token: int) -> bool:
        """Whether any query reaches back to ``token``."""
        return self.sliding_window is None or self.first - token < self.sliding_window

    def weigh(self, keys: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Unnormalised weights [b, H, M, n] of rotated keys [b, H, n, D], and the factor older sums fade by."""
        scores = cap_scores(self.query @ keys.to(self.query.dtype).transpose(-1, -2), self.softcap)
        hidden = self._hidden(first, keys.shape[2])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # a query that has seen nothing yet has no maximum to subtract
        reference = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
        fade = torch.exp(self.peak - reference)
        weights = torch.exp(scores - reference)
        self.peak = peak
        self.norm = self.norm * fade + weights.sum(-1, keepdim=True)
        self.total = self.total * fade
        return weights, fade

    def add(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Take in exact rotated keys and values [b, H, n, D] of the tokens from ``first`` on."""
        if self.sees(first + keys.shape[2] - 1):
            weights, _ = self.weigh(keys, first)
            self.total = self.total + weights @ values.to(weights.dtype)

    def sink(self, logits: Tensor) -> None:
        """Take in one more logit per query head [Hq] that has no value."""
        scores = logits.to(self.norm.dtype).view(self.norm.shape[1], -1, 1).expand(-1, -1, self.count)
        scores = scores.reshape(1, self.norm.shape[1], -1, 1)
        peak = torch.maximum(self.peak, scores)
        fade = torch.exp(self.peak - peak)
        self.norm, self.total, self.peak = self.norm * fade + torch.exp(scores - peak), self.total * fade, peak

    def result(self) -> Tensor:
        """The weighted means, as [b, Hq, q, D]."""
        return (self.total / self.norm).reshape(self.shape)

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


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows [b, n, C] as [b, H, n, D]."""
    return torch.unflatten(rows, -1, (heads, -1)).transpose(1, 2)
