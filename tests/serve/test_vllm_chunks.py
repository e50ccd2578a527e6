"""Chunks of prompts over what is packed: the two fused attentions against the store's own running softmax."""

from __future__ import annotations

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
