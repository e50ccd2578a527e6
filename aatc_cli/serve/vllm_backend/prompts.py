"""Attention of prompts, whole or in chunks: exact among their own tokens, over packed ones before them.

Both are calls of fused attention, the engine's or torch's, that also give the normalisers, by which the two are put
together, and which say what tokens receive.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_with_sums, causal_mask
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.kernels.received_rows import received_of
from aatc_cli.runtime.softmax import by_head
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.layer import TileLayer
from aatc_cli.runtime.tiles.store import TileStore
from aatc_cli.serve.vllm_backend.flash import flash_attention
from aatc_cli.serve.vllm_backend.quick import plain_keys

# tiles that are read at once, which bounds the numbers alive
_TILES = 256


def attend_chunk(
    store: TileStore, rows: tuple[Tensor, Tensor, Tensor], back: tuple[Tensor, Tensor], view: LayerView, out: Tensor
) -> None:
    """Attention of the next tokens of ``store`` into ``out`` [n, Hq, D]; the store takes them in.

    rows: rotated queries [n, Hq, D], keys and values [n, H, D]; back: what takes the rotation off (`Turning.back`).
    """
    query, keys, values = rows
    out.copy_(attend_prompt(store, query, (keys, values), view))
    store.append(plain_keys(keys, back)[None], values.flatten(1)[None])


def attend_prompt(store: TileStore, query: Tensor, fresh: tuple[Tensor, Tensor], view: LayerView) -> Tensor:
    """Attention of the next tokens of ``store`` before they are appended. -> [n, Hq, D].

    query [n, Hq, D] and fresh keys and values [n, H, D] are rotated. The store is told what its tokens receive.
    """
    queries, keys, values = (rows.transpose(0, 1)[None] for rows in (query, *fresh))
    lags = store.layer.rule.lags(store.window.recent)
    found, sums = _attention(queries, keys, values, view.scaling, causal=True)
    if not store.tokens:
        store.received.prompt(received_of(query, fresh[0], sums[0], view.scaling, lags, 0))
        return found[0].transpose(0, 1)
    past, past_sums, near = _before(store, queries, view)
    both = torch.logaddexp(sums, past_sums)
    own, theirs = ((part - both).exp()[..., None] for part in (sums, past_sums))
    whole = found.float() * own + past.float() * theirs
    received = received_of(query, torch.cat((near, fresh[0].to(near.dtype))), both[0], view.scaling, lags, len(near))
    # nobody asks what sinks receive, which may be among these tokens
    received[..., : max(store.window.sinks - store.tokens, 0)] = 0.0
    store.received.paid(store.packed, received, len(near))
    return whole[0].transpose(0, 1).to(query.dtype)


def _before(store: TileStore, query: Tensor, view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of queries [1, Hq, n, D] over all that ``store`` has, its normalisers [1, Hq, n], and the ring.

    The ring: rotated keys [m, H, D] of the exact tokens behind the packed ones.
    """
    exact, heads, sinks = store.exact, store.layer.heads, store.window.sinks
    ring_keys, ring_values = exact.between(store.packed, max(store.tokens - sinks, 0))
    parts = [(exact.sink_keys, exact.sink_values, 0), (ring_keys, ring_values, sinks + store.packed)]
    keys, values = [], []
    for part_keys, part_values, place in parts:
        keys.append(_rotated(by_head(part_keys, heads), view, place).to(query.dtype))
        values.append(by_head(part_values, heads).to(query.dtype))
    dropped = []
    for start, tiles in store.pages.parts(_TILES):
        rows = store.layer.read(tiles)
        keys.append(_rotated(rows.keys, view, sinks + start * store.layer.rule.tile).to(query.dtype))
        values.append(rows.values.to(query.dtype))
        dropped += [] if rows.dropped is None else [rows.dropped]
    hidden = torch.cat(dropped, 2) if dropped else None
    found, sums = _over(store.layer, query, (torch.cat(keys, 2), torch.cat(values, 2)), hidden, view.scaling)
    return found, sums, keys[1][0].transpose(0, 1)


def _over(
    layer: TileLayer, query: Tensor, rows: tuple[Tensor, Tensor], dropped: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention over all ``rows`` but those that a head keeps nothing of: the last ones, dropped [1, H, m]."""
    if dropped is None:
        return _attention(query, *rows, scaling, causal=False)
    # fused attention knows no masks of heads; how many tokens a head does not see is known, since all tiles are alike
    count, tiles, group = rows[0].shape[2], dropped.shape[2] // layer.rule.tile, query.shape[1] // dropped.shape[1]
    hidden = torch.nn.functional.pad(dropped[0], (count - dropped.shape[2], 0)).to(torch.int8)
    found = []
    for head, gone in enumerate(_dropped_of_tile(layer)):
        seen = hidden[head].argsort(stable=True)[: count - gone * tiles]
        keys, values = (part[:, head : head + 1].index_select(2, seen) for part in rows)
        found.append(_attention(query[:, head * group : (head + 1) * group], keys, values, scaling, causal=False))
    return torch.cat([each for each, _ in found], 1), torch.cat([sums for _, sums in found], 1)


@cache
def _dropped_of_tile(layer: TileLayer) -> list[int]:
    """How many tokens of a tile every head keeps nothing of."""
    assert layer.dropped is not None
    quotas = torch.tensor(layer.rule.quotas)
    found: list[int] = (layer.dropped.cpu().T.to(torch.int64) @ quotas).tolist()
    return found


def _attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention [1, Hq, n, D] over keys and values [1, H, m, D], and its normalisers float32 [1, Hq, n]."""
    by_token = [rows[0].transpose(0, 1) for rows in (query, keys, values)]
    own = flash_attention(by_token[0], by_token[1], by_token[2], scaling, causal=causal)
    if own is not None:
        return own[0].transpose(0, 1)[None], own[1][None].float()
    found = attention_with_sums(query, keys, values, scaling, causal=causal)
    if found is not None:
        return found[0], found[1].float()
    folded = torch.unflatten(query.float(), 1, (keys.shape[1], -1))
    scores = folded @ keys.float().transpose(-1, -2)[:, :, None] * scaling
    if causal:
        scores = scores.masked_fill(~causal_mask(query.shape[2], None, query.device), -torch.inf)
    sums = scores.logsumexp(-1)
    out = (scores - sums[..., None]).exp() @ values.float()[:, :, None]
    return out.flatten(1, 2).to(query.dtype), sums.flatten(1, 2)


def _rotated(keys: Tensor, view: LayerView, place: int) -> Tensor:
    cos, sin = view.tables(place, keys.shape[2])
    return apply_rope(keys, cos[None], sin[None], view.rope)
