"""Teacher-forced evaluation of tiles: every token coded at the widths of its class, which decoding would know.

The class of a token depends on what it received from queries that themselves read tiles packed before. So each layer
goes through its queries in the order of decoding, a tile at a time: between two tiles that leave all queries read the
same packed tokens, and when a tile leaves the window every query that counts for its tokens has been seen. What every
class would give back for a token is known before, for all tokens at once, so that in between tokens are only chosen.
What leaves when a prompt ends is coded for the class it is of alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.attend import cap_scores, softmax_with_sinks
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.ranked import classes_of_kept
from aatc_cli.core.received import received_within
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.evals.forced.exact_rows import as_held
from aatc_cli.evals.forced.teacher_forced import Method, check_inputs
from aatc_cli.evals.forced.tile_hats import TileCodecs, class_hats, code_prompt, code_tile, dropped_classes, hide_tokens
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import AttentionFunction, LayerInputs, attention_override, behind_prompt, scored_logits

# told of every layer: the classes [B, orders, P] of its packed tokens
OnClasses = Callable[[int, Tensor], None]


def tile_codecs(method: Method) -> list[dict[Side, TileCodec]]:
    """The codecs of a method whose caches are tiles."""
    found: list[dict[Side, TileCodec]] = []
    for layer in method.codecs:
        sides: dict[Side, TileCodec] = {}
        for side in SIDES:
            codec = layer[side]
            assert isinstance(codec, TileCodec)
            sides[side] = codec
        found.append(sides)
    return found


def tiled_logits(
    model: torch.nn.Module,
    sites: list[AttentionSite],
    codecs: list[dict[Side, TileCodec]],
    rule: TileRule,
    window: Window,
    tokens: Tensor,
    first: int,
    on_classes: OnClasses | None = None,
) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of a window [1, T] read through a cache of tiles. -> [P, V]."""

    with attention_override(model, sites, tiles_attention(codecs, rule, window, on_classes)):
        return scored_logits(model, tokens, first)


def tiles_attention(
    codecs: list[dict[Side, TileCodec]], rule: TileRule, window: Window, on_classes: OnClasses | None, prompt: int = 0
) -> AttentionFunction:
    """The attention of a cache of tiles, behind a prefill of ``prompt`` tokens."""

    def attend(inputs: LayerInputs) -> Tensor:
        layer = inputs.site.layer
        out, classes = tiled_attention(as_held(inputs, window), codecs[layer], rule, window, prompt)
        if on_classes is not None:
            on_classes(layer, classes)
        return out

    return behind_prompt(prompt, attend)


@dataclass(frozen=True)
class Stays:
    """What a press left of a prompt. kept [B, H, P]; classes [B, H, P] where it says them, else tiles are ranked."""

    kept: Tensor
    classes: Tensor | None = None


def tiled_attention(
    inputs: LayerInputs, codecs: TileCodecs, rule: TileRule, window: Window, prompt: int = 0, left: Stays | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every query over exact sinks and window and packed tiles; classes of the tokens of the latter.

    A class without bits on either side is not kept: no query of that head sees its tokens. Queries of the ``prompt``
    saw everything exactly, and only those behind it are given. left: of its tokens those that a press leaves, in
    tiles of their own. -> [B, Hq, T - prompt, D], [B, orders, P].
    """
    check_inputs(inputs)
    length, heads = inputs.query.shape[2], inputs.key.shape[1]
    packed = slice(window.sinks, window.sinks + packed_tokens(length, window))
    # what leaves when a prompt ends is coded for the class it is of; what a press leaves fills no whole tiles by place
    ahead = packed_tokens(min(prompt + 1, length), window) if prompt and left is None else 0
    hats = class_hats(inputs, codecs, slice(packed.start + ahead, packed.stop))
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    query = torch.unflatten(inputs.query, 1, (heads, -1)).to(wide) * inputs.scaling
    held = inputs.key.to(wide, copy=True), inputs.value.to(wide, copy=True)
    hidden, dropped = held[0].new_zeros(held[0].shape[0], heads, 1, 1, length), dropped_classes(codecs, heads)
    received = held[0].new_zeros(held[0].shape[0], rule.orders(heads), length)
    if prompt:
        received[..., :prompt] = _of_prompt(inputs, rule, rule.lags(window.recent), prompt)
    parts, found, start, done = [], [], prompt, 0
    # of a prompt that is pressed what leaves the window behind it is coded apart
    ends = [packed for packed in (packed_tokens(prompt, window),) if packed and left is not None]
    while start < length:
        for until in (*ends, packed_tokens(start + 1, window)):
            leaving = slice(window.sinks + done, window.sinks + until)
            if until <= done:
                continue
            stays, classes = _leaving(rule, received, left if ends else None, leaving, done, inputs.site.layer)
            found.append(classes)
            if done < ahead:
                code_prompt(inputs, codecs, leaving, classes, held)
            else:
                code_tile(leaving, done - ahead, classes.expand(-1, heads, -1), hats, held)
            if dropped is not None:
                hide_tokens(hidden[..., 0, 0, leaving], classes, dropped)
            if stays is not None:
                hidden[..., 0, 0, leaving].masked_fill_(~stays, -torch.inf)
            done, ends = until, []
        end = min(window.sinks + done + window.recent, length)
        seen = slice(0 if inputs.sliding_window is None else max(start + 1 - inputs.sliding_window, 0), end)
        mask = None if dropped is None and left is None else hidden[..., seen]
        weights = _weights(inputs.site, query[:, :, :, start:end], held[0][:, :, seen], mask)
        out = weights.flatten(2, 3) @ held[1][:, :, seen]
        parts.append(out.view(*weights.shape[:4], -1).flatten(1, 2))
        _watch(received, weights, rule, rule.lags(window.recent), start, seen)
        start = end
    none = torch.zeros(*received.shape[:2], 0, dtype=torch.int64, device=received.device)
    return torch.cat(parts, 2).to(inputs.query.dtype), torch.cat(found, 2) if found else none


def _leaving(
    rule: TileRule, received: Tensor, left: Stays | None, leaving: slice, done: int, layer: int
) -> tuple[Tensor | None, Tensor]:
    """Which of the tokens ``leaving`` the window stay, None for all, and their classes [B, orders, P]."""
    if left is None:
        return None, classes_of_kept(rule, received[..., leaving], None, done, layer)
    stays = left.kept[..., leaving]
    if left.classes is not None:
        return stays, left.classes[..., leaving].clamp_min(0)
    return stays, classes_of_kept(rule, received[..., leaving], stays, done, layer)


def _of_prompt(inputs: LayerInputs, rule: TileRule, lags: tuple[int, int], prompt: int) -> Tensor:
    """What the tokens of a prompt receive of one another: [B, orders, prompt]."""
    found: Tensor | None = inputs.memo.get(("received", lags, prompt))
    if found is None:
        found = inputs.memo["received", lags, prompt] = _received_in(inputs, lags, prompt)
    return found if rule.order == "head" else found.sum(1, keepdim=True)


def _received_in(inputs: LayerInputs, lags: tuple[int, int], prompt: int) -> Tensor:
    site, (query, keys, values) = inputs.site, (x[:, :, :prompt] for x in (inputs.query, inputs.key, inputs.value))
    return received_within(
        query, keys, values, inputs.scaling, lags, sliding=inputs.sliding_window, sinks=site.sinks, softcap=site.softcap
    )


def _weights(site: AttentionSite, query: Tensor, keys: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention weights [B, H, G, n, S] of the scaled queries of the last n of S tokens; scores get ``hidden``."""
    heads, sinks, count, size = keys.shape[1], site.sinks, query.shape[3], keys.shape[2]
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).view(*query.shape[:4], size)
    scores = cap_scores(scores, site.softcap)
    mask = _mask(count, size, site.sliding_window, scores.device, scores.dtype)
    scores[..., size - mask.shape[1] :] += mask
    if hidden is not None:
        scores += hidden
    return softmax_with_sinks(scores, None if sinks is None else sinks.view(heads, -1, 1, 1))


def _watch(received: Tensor, weights: Tensor, rule: TileRule, lags: tuple[int, int], start: int, seen: slice) -> None:
    """Add to ``received`` [B, orders, T] what the queries from ``start`` on pay the tokens they watch."""
    first, last = lags
    end = seen.stop
    band = slice(max(start - last, seen.start), max(end - first, seen.start))
    if band.stop > band.start:
        watched = _watched(end - start, band.stop - band.start, start - band.start, lags, weights.device, weights.dtype)
        part = weights[..., band.start - seen.start : band.stop - seen.start]
        received[..., band] += rule.received(part, watched)


# the same for every layer and nearly every tile of a pass
@lru_cache(maxsize=64)
def _mask(count: int, size: int, sliding: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the last ``count`` of ``size`` tokens: [count, m], of the last m tokens.

    Those before are seen by all.
    """
    width = count if sliding is None or size <= sliding else size
    queries, places = torch.arange(size - count, size), torch.arange(size - width, size)
    lag = queries[:, None] - places
    seen = (lag >= 0) if sliding is None else (lag >= 0) & (lag < sliding)
    return torch.zeros(lag.shape, dtype=dtype).masked_fill(~seen, -torch.inf).to(device)


@lru_cache(maxsize=64)
def _watched(
    count: int, size: int, ahead: int, lags: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """1 where a query counts for a token, else 0: [count, size]; query 0 stands ``ahead`` of token 0."""
    lag = torch.arange(count)[:, None] + ahead - torch.arange(size)
    return ((lag >= lags[0]) & (lag <= lags[1])).to(dtype).to(device)
