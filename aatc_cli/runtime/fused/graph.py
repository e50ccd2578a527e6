"""Greedy decoding of a whole model as one replayed CUDA graph over a fused cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.errors import AatcError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.captured import CapturedStep
from aatc_cli.runtime.fused.shared import FusedShared
from aatc_cli.runtime.fused.store import FusedStore
from aatc_cli.runtime.state import CompressedState


class GraphDecoder:
    """One decode step of ``model`` over ``cache``, captured once and replayed per token.

    Made inside the block after the prompt has been fed; ``first`` [B] are the tokens that follow it. The cache must
    have been made with room for all tokens there will be. The graph belongs to this cache, whose buffers it reads.
    """

    def __init__(self, model: Any, cache: HostedCache, keyword: str, first: Tensor) -> None:
        self.state, self.stores, self.shared = captured_parts(cache.state)
        kwargs = {keyword: cache, "use_cache": True, "logits_to_keep": 1}
        if self.stores[0].room is None:
            raise AatcError("a cache that grows cannot be captured", "make it by session.new_cache(room=TOKENS)")
        tokens = first[:, None].clone()
        [group] = self.state.groups
        # the prompt has moved nothing on the device yet: every captured step goes on from here
        self.shared.turn(group.offset)
        self.shared.move(self.stores[0].tokens, self.stores[0].packed)
        self.decoding = CapturedStep(model, kwargs, tokens, torch.full_like(tokens, group.offset + group.length))
        self._capture()

    @property
    def logits(self) -> Tensor | None:
        """Of the latest step, [B, V]."""
        return self.decoding.logits

    def step(self) -> Tensor:
        """Feed the current tokens and choose the next, [B]; they are the graph's own buffer, fed by the next step."""
        for store in self.stores:
            store.reserve(store.tokens + 1)
        self.decoding.run()
        advance(self.state)
        return self.decoding.tokens[:, 0]

    def _capture(self) -> None:
        saved, room = self._save(), self.stores[0].room
        # steps that are only tried out need room; what they write is put back
        for store in self.stores:
            store.room = None
            store.reserve(store.tokens + 3)
        self.state.steady = True
        self.decoding.capture(lambda: self._load(saved))
        self._load(saved)
        self.state.steady = False
        for store in self.stores:
            store.room = room

    def _save(self) -> tuple[int, int, list[Tensor]]:
        return self.state.columns, self.stores[0].packed, [tensor.clone() for tensor in self._changed()]

    def _load(self, saved: tuple[int, int, list[Tensor]]) -> None:
        columns, packed, tensors = saved
        back = self.state.columns - columns
        self.state.columns = columns
        self.state.groups[0].length -= back
        for store in self.stores:
            store.tokens, store.packed = store.tokens - back, packed
        self.shared.count, self.shared.packed = self.stores[0].tokens, packed
        for tensor, before in zip(self._changed(), tensors, strict=True):
            tensor.copy_(before)

    def _changed(self) -> list[Tensor]:
        """What a step writes and must not have written before the first real one: counters, angles, exact rows."""
        shared = self.shared
        counters = [self.decoding.tokens, self.decoding.positions, shared.tokens, shared.tiles, shared.slot_angles]
        return [*counters, *(store.keys for store in self.stores), *(store.values for store in self.stores)]


def captured_parts(state: Any) -> tuple[CompressedState, list[FusedStore], FusedShared]:
    """The stores of a fused cache and what they share; raises `AatcError` for a cache that cannot be captured."""
    groups = state.groups if isinstance(state, CompressedState) else []
    stores = [store for group in groups for store in group.stores if isinstance(store, FusedStore)]
    if len(groups) != 1 or len(stores) != len(groups[0].stores):
        raise AatcError(
            "only a fused cache of sequences of one length can be captured in a graph", "attach with cache='fused'"
        )
    return state, stores, stores[0].shared


def advance(state: CompressedState) -> None:
    """Count one more token of every sequence on the host, as a replayed step has done on the device."""
    _, stores, shared = captured_parts(state)
    state.columns += 1
    state.groups[0].length += 1
    for store in stores:
        store.tokens += 1
        store.packed = max(packed_tokens(store.tokens, store.window), store.packed)
    shared.count, shared.packed = stores[0].tokens, stores[0].packed
