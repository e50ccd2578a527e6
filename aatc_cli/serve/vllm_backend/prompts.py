"""Attention of prompts, whole or in chunks: exact among their own tokens, over packed ones before them.

It is torch's, as in the fused cache, with the normalisers that say what tokens receive; a later chunk goes a few
hundred queries at a time over what is packed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_with_sums
from aatc_cli.runtime.kernels.received_rows import received_of
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.store import TileStore
from aatc_cli.serve.vllm_backend.quick import plain_keys

# queries of a later chunk at once, over many tokens before it; over few of them as many as their scores have room for
_AT_ONCE, _SCORES = 256, 256 * 16384


def attend_chunk(
    store: TileStore, rows: tuple[Tensor, Tensor, Tensor], back: tuple[Tensor, Tensor], view: LayerView, out: Tensor
) -> None:
    """Attention of the next tokens of ``store`` into ``out`` [n, Hq, D]; the store takes them in.

    rows: rotated queries [n, Hq, D], keys and values [n, H, D]; back: what takes the rotation off (`Turning.back`).
    """
    query, keys, values = rows
    unturned = plain_keys(keys, back)
    step = max(_AT_ONCE, _SCORES // (store.tokens + query.shape[0])) if store.tokens and query.is_cuda else len(query)
    for start in range(0, query.shape[0], step):
        part = slice(start, start + step)
        out[part] = attend_prompt(store, query[part], (keys[part], values[part]), view)
        store.append(unturned[part][None], values[part].flatten(1)[None])


def attend_prompt(store: TileStore, query: Tensor, fresh: tuple[Tensor, Tensor], view: LayerView) -> Tensor:
    """Attention of the next tokens of ``store`` before they are appended. -> [n, Hq, D].

    query [n, Hq, D] and fresh keys and values [n, H, D] are rotated. The store is told what its tokens receive.
    """
    keys, values = (rows.transpose(0, 1)[None] for rows in fresh)
    queries = query.transpose(0, 1)[None]
    if store.tokens:
        return store.attend(queries, view, (keys, values))[0].transpose(0, 1)
    found = attention_with_sums(queries, keys, values, view.scaling)
    if found is not None:
        lags = store.layer.rule.lags(store.window.recent)
        store.received.prompt(received_of(query, fresh[0], found[1][0].float(), view.scaling, lags, 0))
        return found[0][0].transpose(0, 1)
    store.watch(queries, keys, replace(view, sums=None))
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=view.scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)
