"""Chunks of prompts over what is packed: the two fused attentions against the store's own running softmax."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.layer import TileLayer
from aatc_cli.runtime.tiles.store import TileStore
from aatc_cli.serve.vllm_backend import flash
from aatc_cli.serve.vllm_backend.prompts import attend_prompt

HEADS, GROUP, DIM = 2, 3, 32
WINDOW, RULE = Window(sinks=4, recent=128, flush=64), TileRule((32, 16, 16), "head")


def layer_of(dropping: bool) -> TileLayer:
    """A layer whose first head keeps nothing of its lowest class, if it is ``dropping``."""
    pair = {}
    for index, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(index)
        encode = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=generator))[0]
        spread = torch.linspace(1.5, 0.1, DIM).repeat(HEADS)
        bits = torch.stack([(spread * w).round().clamp(0, 8).long() for w in (2, 3, 4)])
        if dropping:
            bits[0, :DIM] = 0
        ones = torch.ones(HEADS * DIM)
        codec = TransformCodec(encode, encode.mT.contiguous(), ones, bits[0], spread.square(), "uniform", scale_bits=8)
        pair[side] = TileCodec(codec, bits, RULE)
    return TileLayer(0, pair, dict.fromkeys(SIDES), RULE, HEADS, RecordTiles(pair, RULE, HEADS))


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize(("first", "new"), [(2, 3), (2, 90), (100, 90), (260, 1), (260, 300), (600, 90)])
def test_a_chunk_sees_what_the_store_would_show_it(dropping, first, new):
    layer = layer_of(dropping)
    angles = torch.arange(1000)[:, None] * (1 / 10000 ** (torch.arange(0, DIM, 2) / DIM)).repeat(2)
    cos, sin = angles.cos(), angles.sin()
    view = LayerView(DIM**-0.5, lambda place, count: (cos[place : place + count], sin[place : place + count]))
    generator = torch.Generator().manual_seed(first + new)
    keys, values = (torch.randn(1, first + new, HEADS * DIM, generator=generator) for _ in range(2))
    query = torch.randn(new, HEADS * GROUP, DIM, generator=generator)
    received = torch.rand(1, HEADS, first, generator=generator)
    stores = []
    for _ in range(2):
        stores.append(TileStore(layer, WINDOW, 1, torch.float32))
        stores[-1].received.prompt(received)
        stores[-1].append(keys[:, :first], values[:, :first])
    fresh = [torch.unflatten(rows[:, first:], -1, (HEADS, DIM)).transpose(1, 2) for rows in (keys, values)]
    fresh[0] = apply_rope(fresh[0], cos[None, first : first + new], sin[None, first : first + new], view.rope)

    found = attend_prompt(stores[0], query, tuple(rows[0].transpose(0, 1) for rows in fresh), view)
    wanted = stores[1].attend(query.transpose(0, 1)[None], view, tuple(fresh))[0].transpose(0, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    for store in stores:
        store.append(keys[:, first:], values[:, first:])
    one, other = (store.received.sums for store in stores)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def attention_of_the_engine(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **others):
    """What vLLM's function gives for one text: rows by token, normalisers by head; ends of queries and keys agree."""
    assert (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()) == ([0, len(q)], [0, len(k)])
    assert (others["max_seqlen_q"], others["max_seqlen_k"], others["fa_version"]) == (len(q), len(k), 3)
    scores = torch.einsum("qhgd,khd->hgqk", torch.unflatten(q, 1, (k.shape[1], -1)), k) * softmax_scale
    if causal:
        scores += torch.full(scores.shape[-2:], -torch.inf).triu(1 + len(k) - len(q))
    rows = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v).flatten(1, 2)
    return rows, scores.logsumexp(-1).flatten(0, 1)


@pytest.mark.parametrize("first", [0, 260])
def test_the_engine_s_own_attention_is_taken_where_it_has_one(first, monkeypatch):
    """Rows and what tokens receive are those of torch's attention."""
    layer, angles = (
        layer_of(False),
        torch.arange(1000)[:, None] * (1 / 10000 ** (torch.arange(0, DIM, 2) / DIM)).repeat(2),
    )
    cos, sin = angles.cos(), angles.sin()
    view = LayerView(DIM**-0.5, lambda place, count: (cos[place : place + count], sin[place : place + count]))
    generator = torch.Generator().manual_seed(first)
    query, keys, values = (torch.randn(90, heads, DIM, generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS))
    before = torch.randn(2, 1, first, HEADS * DIM, generator=generator)
    found, stores = [], []
    utils = SimpleNamespace(flash_attn_varlen_func=attention_of_the_engine, get_flash_attn_version=lambda head_size: 3)
    for own in (False, True):
        if own:
            monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", utils)
            monkeypatch.setattr(flash, "_usable", lambda *given: True)
        stores.append(TileStore(layer, WINDOW, 1, torch.float32))
        if first:
            stores[-1].received.prompt(torch.ones(1, HEADS, first))
            stores[-1].append(*before)
        found.append(attend_prompt(stores[-1], query, (keys, values), view))
        stores[-1].append(keys.flatten(1)[None], values.flatten(1)[None])
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(*(store.received.sums for store in stores), rtol=1e-5, atol=1e-6)
