"""Attention of prompts, whole or in chunks: exact among their own tokens, over packed ones before them.

Where the engine's FlashAttention is at hand it attends, and what tokens receive follows from its normalisers;
elsewhere torch does, as in the fused cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_with_sums
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.softmax import by_head
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.store import TileStore
from aatc_cli.serve.vllm_backend.quick import plain_keys, received_of

# queries of a chunk that torch attends with at once
_AT_ONCE = 256


def attend_chunk(
    store: TileStore, rows: tuple[Tensor, Tensor, Tensor], back: tuple[Tensor, Tensor], view: LayerView, out: Tensor
) -> None:
    """Attention of the next tokens of ``store`` into ``out`` [n, Hq, D]; the store takes them in.

    rows: rotated queries [n, Hq, D], keys and values [n, H, D]; back: what takes the rotation off (`Turning.back`).
    """
    query, keys, values = rows
    unturned = plain_keys(keys, back)
    step = pieces(store, query)
    for start in range(0, query.shape[0], step):
        part = slice(start, start + step)
        out[part] = attend_prompt(store, query[part], (keys[part], values[part]), view)
        store.append(unturned[part][None], values[part].flatten(1)[None])


def attend_prompt(store: TileStore, query: Tensor, fresh: tuple[Tensor, Tensor], view: LayerView) -> Tensor:
    """Attention of the next tokens of ``store`` before they are appended. -> [n, Hq, D].

    query [n, Hq, D] and fresh keys and values [n, H, D] are rotated. The store is told what its tokens receive.
    """
    if _flashes(store, query):
        return _by_flash(store, query, fresh, view)
    keys, values = (rows.transpose(0, 1)[None] for rows in fresh)
    queries = query.transpose(0, 1)[None]
    if store.tokens:
        return store.attend(queries, view, (keys, values))[0].transpose(0, 1)
    out, sums = attention_with_sums(queries, keys, values, view.scaling) or (None, None)
    store.watch(queries, keys, replace(view, sums=sums))
    if out is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=view.scaling, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def pieces(store: TileStore, query: Tensor) -> int:
    """How many of the next tokens `attend_prompt` should be given at once."""
    whole = not store.tokens or not query.is_cuda or _flashes(store, query)
    return int(query.shape[0]) if whole else _AT_ONCE


def _flashes(store: TileStore, query: Tensor) -> bool:
    """Whether FlashAttention is there; it cannot hide packed tokens of which a head keeps nothing."""
    return flash_attention(query) is not None and (store.layer.dropped is None or not store.tokens)


def flash_attention(query: Tensor) -> Any:
    """The engine's FlashAttention for queries like these, or None where there is none."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    return _flash_attention()


@cache
def _flash_attention() -> Any:
    try:
        return import_module("vllm.v1.attention.backends.fa_utils").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


def _by_flash(store: TileStore, query: Tensor, fresh: tuple[Tensor, Tensor], view: LayerView) -> Tensor:
    keys, values = fresh
    if store.tokens:
        earlier = _before(store, view, keys.dtype)
        keys, values = (torch.cat(pair) for pair in zip(earlier, fresh, strict=True))
    count, total = query.shape[0], keys.shape[0]
    lengths = [_ends(n, query.device) for n in (count, total)]
    utils: Any = import_module("vllm.v1.attention.backends.fa_utils")
    out, normaliser = flash_attention(query)(
        q=query.contiguous(),
        k=keys.contiguous(),
        v=values.contiguous(),
        max_seqlen_q=count,
        cu_seqlens_q=lengths[0],
        max_seqlen_k=total,
        cu_seqlens_k=lengths[1],
        softmax_scale=view.scaling,
        causal=True,
        return_softmax_lse=True,
        # keys of one text are not shared out: prompts fill the device, and sums have one order whatever else runs
        num_splits=1,
        fa_version=utils.get_flash_attn_version(head_size=query.shape[2]),
    )
    # packed tokens receive nothing any more, and of sinks nobody asks
    start = min(store.window.sinks + store.packed, store.tokens)
    before = store.tokens - start
    lags = store.layer.rule.lags(store.window.recent)
    found = received_of(query, keys[start:], normaliser, view.scaling, lags, before)
    if store.tokens:
        store.received.paid(store.packed, found, before)
    else:
        store.received.prompt(found)
    return out  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _ends(count: int, device: torch.device) -> Tensor:
    """Where one text of ``count`` tokens begins and ends: once for all layers, since a copy waits."""
    return torch.tensor([0, count], dtype=torch.int32, device=device)


def _before(store: TileStore, view: LayerView, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotated keys and values [T, H, D] of all tokens of the store, in order, as they are read."""
    heads, tile, sinks = store.layer.heads, store.layer.rule.tile, store.window.sinks
    parts = [(by_head(store.exact.sink_keys, heads), by_head(store.exact.sink_values, heads))]
    for _, data in store.pages.parts(max(store.pages.count, 1)):
        rows = store.layer.read(data)
        parts.append((rows.keys, rows.values))
    count = max(store.tokens - sinks, 0)
    recent = store.exact.between(store.pages.count * tile, count)
    parts.append((by_head(recent[0], heads), by_head(recent[1], heads)))
    keys, values = (torch.cat([part.float() for part in side], 2) for side in zip(*parts, strict=True))
    cos, sin = view.tables(0, keys.shape[2])
    keys = apply_rope(keys, cos[None], sin[None], view.rope)
    return keys[0].transpose(0, 1).to(dtype), values[0].transpose(0, 1).to(dtype)
