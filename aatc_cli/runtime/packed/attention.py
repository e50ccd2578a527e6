"""Attention of a few queries over one layer's store: exact sinks, packed tiles, exact window, under one softmax.

Packed keys are reconstructed, rotated and scored one tile at a time, in float32 whatever the model's dtype. Values are
absorbed: the softmax weights sum latents, and the decode matrix is applied to the sum once. No more history than one
tile is ever in float.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.rope import RopeStyle
from aatc_cli.runtime.packed.stream import PackedStream
from aatc_cli.runtime.softmax import OnlineSoftmax, by_head
from aatc_cli.runtime.store import LayerView

# packed tokens in float at once, of all sequences together: so many that operators, not their calls, take the time
TILE = 2048
TILE_CUDA = 16384


@dataclass(frozen=True)
class StoredTokens:
    """What is read of one packed layer: exact rows [b, n, C] of sinks and window, and the streams between them.

    first: index of the first recent token; tokens: all that are stored.
    """

    sinks: tuple[Tensor, Tensor]
    streams: list[PackedStream]
    recent: tuple[Tensor, Tensor]
    first: int
    tokens: int


def packed_attention(
    query: Tensor,
    stored: StoredTokens,
    view: LayerView,
    fresh: tuple[Tensor, Tensor] | None = None,
    tile: int | None = None,
) -> Tensor:
    """Attention of rotated queries [b, Hq, q, D] over ``stored`` and, causally, over ``fresh`` tokens behind it.

    Arguments and result are those of `runtime.store.Store.attend`. The result is in the query's dtype; sums run in
    float32, or float64 for a float64 model. ``tile``: packed tokens taken at once.
    """
    assert fresh is not None or query.shape[2] == 1
    if tile is None:
        tile = (TILE_CUDA if query.is_cuda else TILE) // query.shape[0]
    heads = stored.sinks[0].shape[2] // query.shape[3]
    softmax = OnlineSoftmax(query, heads, stored.tokens if fresh is not None else stored.tokens - 1, view)
    softmax.rows(*stored.sinks, 0)
    for stream in stored.streams:
        _add_stream(softmax, stream, view, max(tile // stream.flush, 1) * stream.flush)
    softmax.rows(*stored.recent, stored.first)
    if fresh is not None:
        softmax.add(*fresh, stored.tokens)
    return softmax.result(query.dtype)


def _add_stream(softmax: OnlineSoftmax, stream: PackedStream, view: LayerView, tile: int) -> None:
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
        rows = by_head(stream.key_site.keys(keys, key_scales, softmax.query.dtype), heads)
        _rotate(rows, *view.tables(stream.first + start, stop - start), view.rope)
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
