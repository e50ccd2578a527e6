"""Greedy decoding of a whole model as one replayed CUDA graph over a fused cache of tiles.

A step of the graph writes a row, attends and counts on the device. Tokens that must leave the window are packed between
two steps, once in as many as a tile has: before the first step that would otherwise write over them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.captured import CapturedStep
from aatc_cli.runtime.fused_tiles.store import FusedTileStore
from aatc_cli.runtime.state import CompressedState


class TileGraphDecoder:
    """One decode step of ``model`` over ``cache``, captured once and replayed per token.

    Made inside the block after the prompt has been fed; ``first`` [B] are the tokens that follow it. The cache must
    have been made with room for all tokens there will be, and hold more tokens than sinks.
    """

    def __init__(self, model: Any, cache: HostedCache, keyword: str, first: Tensor) -> None:
        self.state, self.stores = _parts(cache.state)
        kwargs = {keyword: cache, "use_cache": True, "logits_to_keep": 1}
        self.shared, [group] = self.stores[0].shared, self.state.groups
        tokens = first[:, None].clone()
        self.decoding = CapturedStep(model, kwargs, tokens, torch.full_like(tokens, group.offset + group.length))
        store = self.stores[0]
        self.shared.move(store.tokens, store.pages.count, store.pages.capacity, group.offset)
        self._capture()

    @property
    def logits(self) -> Tensor | None:
        """Of the latest step, [B, V]."""
        return self.decoding.logits

    def step(self) -> Tensor:
        """Feed the current tokens and choose the next, [B]; they are the graph's own buffer, fed by the next step."""
        self._make_way()
        for store in self.stores:
            store.check_room(store.tokens + 1)
        self.decoding.run()
        self._count(1)
        return self.decoding.tokens[:, 0]

    def _make_way(self) -> None:
        """Pack what the next token would be written over."""
        if self.stores[0].full:
            for store in self.stores:
                store.flush()
            self.shared.tiles += 1

    def _count(self, steps: int) -> None:
        """Count on the host what replayed steps have counted on the device, or take it back."""
        self.state.columns += steps
        self.state.groups[0].length += steps
        for store in self.stores:
            store.tokens += steps
        self.shared.state = (self.stores[0].tokens, self.stores[0].pages.count)

    def _capture(self) -> None:
        self._make_way()
        saved = [tensor.clone() for tensor in self._changed()]
        tokens = self.stores[0].tokens
        self.state.steady = self.shared.steady = True
        self.decoding.capture()
        self.state.steady = self.shared.steady = False
        self._count(tokens - self.stores[0].tokens)
        for tensor, before in zip(self._changed(), saved, strict=True):
            tensor.copy_(before)

    def _changed(self) -> list[Tensor]:
        """What a step writes and must not have written before the first real one."""
        rows = [tensor for store in self.stores for tensor in (store.exact.keys, store.exact.values)]
        sums = [store.received.held for store in self.stores]
        return [self.decoding.tokens, self.decoding.positions, self.shared.tokens, *rows, *sums]


def _parts(state: Any) -> tuple[CompressedState, list[FusedTileStore]]:
    """The stores of a fused cache of tiles; raises `AatcError` for a cache that cannot be captured."""
    groups = state.groups if isinstance(state, CompressedState) else []
    stores = [store for group in groups for store in group.stores if isinstance(store, FusedTileStore)]
    if len(groups) != 1 or len(stores) != len(groups[0].stores) or not stores[0].shared.compiled:
        raise AatcError(
            "only a fused cache of tiles on a GPU, of sequences of one length, can be captured in a graph",
            "attach with cache='fused'",
        )
    if stores[0].room is None:
        raise AatcError("a cache that grows cannot be captured", "make it by session.new_cache(room=TOKENS)")
    if stores[0].tokens <= stores[0].window.sinks:
        raise AatcError("a graph goes on from a prompt that is longer than the sinks", "feed more of it first")
    return state, stores
