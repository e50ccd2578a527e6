"""Attention of a few queries over one layer's store: exact sinks, packed tiles, exact window, under one softmax.

Packed keys are reconstructed, rotated and scored one tile at a time, in float32 whatever the model's dtype. Values are
absorbed: the softmax weights sum latents, and the decode matrix is applied to the sum once. No more history than one
tile is ever in float.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aatc_cli.core.attend import cap_scores
from aatc_cli.core.casting import saturated
from aatc_cli.core.rope import RopeStyle, apply_rope
from aatc_cli.runtime.store import LayerStore, PackedStream

# packed tokens in float at once, of all sequences together: so many that operators, not their calls, take the time
TILE = 2048
TILE_CUDA = 16384

# cos and sin [n, R] of tokens first .. first + n - 1, in the model's dtype
Tables = Callable[[int, int], tuple[Tensor, Tensor]]


def cached_attention(
    query: Tensor,
    store: LayerStore,
    tables: Tables,
    scaling: float,
    *,
    sliding_window: int | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,
    tile: int | None = None,
    rope: RopeStyle = "half",
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of rotated queries [b, Hq, q, D] over ``store`` and, causally, over ``fresh`` tokens behind it.

    fresh: rotated keys and values [b, H, q, D] of the queries' own tokens, not in the store yet; without it there is
    one query, that of the store's last token. ``tables`` gives the rotation of the store's tokens by index, ``rope``
    how pairs lie; sinks [Hq] and softcap are those of `core.attend.masked_attention`. The result [b, Hq, q, D] is in
    the query's dtype; sums run in float32, or float64 for a float64 model. ``tile``: packed tokens taken at once.
    """
    assert fresh is not None or query.shape[2] == 1
    if tile is None:
        tile = (TILE_CUDA if query.is_cuda else TILE) // query.shape[0]
    heads = store.ring_keys.shape[2] // query.shape[3]
    last = store.tokens if fresh is not None else store.tokens - 1
    softmax = _OnlineSoftmax(query, heads, scaling, last, sliding_window, softcap)

    def exact(keys: Tensor, values: Tensor, first: int) -> None:
        if keys.shape[1]:
            cos, sin = tables(first, keys.shape[1])
            softmax.add(apply_rope(_by_head(keys, heads), cos[None], sin[None], rope), _by_head(values, heads), first)

    exact(store.sink_keys, store.sink_values, 0)
    for stream in store.streams:
        _add_stream(softmax, stream, tables, rope, max(tile // stream.flush, 1) * stream.flush)
    exact(*store.recent())
    if fresh is not None:
        softmax.add(*fresh, store.tokens)
    if sinks is not None:
        softmax.sink(sinks)
    return saturated(softmax.result(), query.dtype)


def _add_stream(softmax: _OnlineSoftmax, stream: PackedStream, tables: Tables, rope: RopeStyle, tile: int) -> None:
    """Score a stream tile by tile, sum its value latents under the softmax, and decode the sum once."""
    site = stream.value_site
    heads = softmax.total.shape[1]
    sums: list[Tensor] | None = None
    weights = torch.zeros_like(softmax.norm)
    for start in range(0, stream.tokens, tile):
        stop = min(start + tile, stream.tokens)
        if not softmax.sees(stream.first + stop - 1):
            continue
        keys, key_scales, values, value_scales = stream.tile(start, stop)
        rows = _by_head(stream.key_site.keys(keys, key_scales, softmax.query.dtype), heads)
        _rotate(rows, *tables(stream.first + start, stop - start), rope)
        part, fade, mass = softmax.weigh(rows, stream.first + start)
        weights = weights * fade + mass
        found = site.value_sums(values, part * value_scales.repeat_interleave(heads // site.groups, 1)[:, :, None])
        if sums is not None:
            fades = fade.chunk(site.groups, 1)
            found = [new + old * f for new, old, f in zip(found, sums, fades, strict=True)]
        sums = found
    if sums is not None:
        softmax.total += site.values(sums, weights.to(site.dtype))


def _rotate(keys: Tensor, cos: Tensor, sin: Tensor, rope: RopeStyle) -> None:
    """`core.rope.apply_rope` in place, for keys [b, H, n, D] whose tokens lie side by side in memory."""
    if rope == "none":
        return
    cos, sin = cos.T.to(keys.dtype).contiguous(), sin.T.to(keys.dtype).contiguous()
    if rope == "half-once":
        cos, sin = torch.cat((cos, cos)), torch.cat((sin, sin))
    rotary = cos.shape[0]
    turned = keys.transpose(2, 3)[:, :, :rotary]
    half = slice(None, rotary // 2), slice(rotary // 2, None)
    one, other = (slice(0, None, 2), slice(1, None, 2)) if rope == "interleaved" else half
    first, second = turned[:, :, one], turned[:, :, other]
    crossed = first * sin[other]
    first.mul_(cos[one]).addcmul_(second, sin[one], value=-1)
    second.mul_(cos[other]).add_(crossed)


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

    def weigh(self, keys: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unnormalised weights [b, H, M, n] of rotated keys [b, H, n, D], the factor older sums fade by, their sum."""
        scores = cap_scores(self.query @ keys.to(self.query.dtype).transpose(-1, -2), self.softcap)
        hidden = self._hidden(first, keys.shape[2])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # a query that has seen nothing yet has no maximum to subtract
        reference = peak if hidden is None else torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
        fade = torch.exp(self.peak - reference)
        weights = (scores - reference).exp_()
        self.peak = peak
        mass = weights.sum(-1, keepdim=True)
        self.norm = self.norm * fade + mass
        self.total = self.total * fade
        return weights, fade, mass

    def add(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Take in exact rotated keys and values [b, H, n, D] of the tokens from ``first`` on."""
        if self.sees(first + keys.shape[2] - 1):
            weights, _, _ = self.weigh(keys, first)
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
