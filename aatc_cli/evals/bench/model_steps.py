"""Time of a whole model's decode step under CUDA graphs at a full cache: fused, and float16 in place with torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aatc_cli.config import Geometry
from aatc_cli.core.layout import packed_tokens
from aatc_cli.evals.bench.attention import Timing, graph_seconds
from aatc_cli.evals.bench.synthetic import random_tiles
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import HostedCache, cache_keyword
from aatc_cli.runtime.batch import Group
from aatc_cli.runtime.fused.graph import captured_parts
from aatc_cli.runtime.session import attend
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.state import CompressedState


class InPlaceState:
    """An uncompressed cache of fixed size that is full: every step writes its newest token and attends to all."""

    recording = False

    def __init__(self, geometry: Geometry, batch: int, context: int, backend: SDPBackend, like: Tensor) -> None:
        shape = (batch, geometry.kv_heads, context, geometry.head_dim)
        self.keys = [torch.randn(shape, device=like.device, dtype=like.dtype) for _ in range(geometry.layers)]
        self.values = [torch.randn(shape, device=like.device, dtype=like.dtype) for _ in range(geometry.layers)]
        self.columns, self.backend = context - 1, backend

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one decode step. -> [B, Hq, 1, D]."""
        keys, values = self.keys[call.site.place], self.values[call.site.place]
        keys[:, :, -1:], values[:, :, -1:] = call.key, call.value
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(call.query, keys, values, scale=call.scaling, enable_gqa=True)

    def select(self, rows: Tensor) -> None:
        """Rows stay where they are."""

    def crop(self, count: int) -> None:
        """Nothing is taken back."""

    def reset(self) -> None:
        """The cache stays full."""


def decode_timing(model: Any, state: Any, batch: int, repeats: int) -> Timing:
    """Seconds per decode step of ``model`` over ``state``, in place or of a fused cache, captured and replayed."""
    device = next(model.parameters()).device
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    positions = torch.full((batch, 1), state.columns, dtype=torch.int64, device=device)
    cache = HostedCache(state, model.config.num_hidden_layers)
    kwargs = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}

    def call() -> int:
        found = model(input_ids=tokens, position_ids=positions, **kwargs).logits[:, -1]
        tokens.copy_(found.argmax(-1, keepdim=True))
        return 1

    with torch.no_grad(), hosted(model, attention_layers(model), attend):
        seconds = graph_seconds(call, repeats)
    fused = isinstance(state, CompressedState)
    moved = state.bytes_live() if fused else state.nbytes
    return Timing("fused" if fused else f"sdpa-{state.backend.name.split('_')[0].lower()}", seconds, moved)


def full_state(spec: CacheSpec, batch: int, context: int, room: int) -> CompressedState:
    """A fused cache of ``context`` random tokens per sequence with ``room`` for more."""
    spec = spec.with_room(context + room)
    state = CompressedState(spec)
    state.columns, state.batch, state.steady = context, batch, True
    state.groups = [Group(list(range(batch)), 0, context, spec.stores(batch))]
    generator = torch.Generator(spec.device).manual_seed(0)
    _, stores, shared = captured_parts(state)
    for store in stores:
        # one sequence at a time: what making them takes is no part of the cache, but of the peak
        for row in range(batch):
            store.data[row] = random_tiles(1, shared.max_tiles, store.layer.tables, generator)[0]
        store.keys.normal_(generator=generator)
        store.values.normal_(generator=generator)
        store.tokens, store.packed = context, packed_tokens(context, spec.window)
    shared.move(context, packed_tokens(context, spec.window))
    return state
