"""Packing of tiles between two steps: the oldest tokens of decoding requests, of all layers, as one captured graph.

A layer's packing is a dozen small launches, and as many layers as a model has of them take the host longer than the
device. Which requests make way differs from step to step, so a graph is captured for a few numbers of tiles and reads
slots, places and blocks from the device; what is left over repeats the first tile, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.runtime.captured import captured
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.serve.vllm_backend.numbers import on_device
from aatc_cli.serve.vllm_backend.rows import ExactSlots

# tiles of a graph; more of them take several replays
_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Oldest:
    """The oldest exact tile of the request in ``slot``, behind ``packed`` packed tokens, to be written to ``block``."""

    slot: int
    packed: int
    block: int


@dataclass(frozen=True)
class _Captured:
    """numbers int64 [3, n]: slots, packed tokens and blocks that the graph reads; where: the caches it writes to."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    where: tuple[int, ...]


class Packing:
    """Packs tiles of requests out of ``exact`` into the engine's blocks."""

    def __init__(self, form: FusedTilesStatic, exact: ExactSlots) -> None:
        self.form, self.exact = form, exact
        self.captured = form.layers[0].tables is not None
        self._graphs: dict[int, _Captured] = {}

    def prepare(self, caches: Sequence[Tensor]) -> None:
        """Capture all graphs, so that no step waits for it; what is written goes to block 0, which nobody reads."""
        if self.captured and all(cache.numel() for cache in caches):
            for size in _SIZES:
                spare = torch.zeros(3, size, dtype=torch.int64, device=self.exact.keys.device)
                spare[0] = self.exact.slots
                self._graph(caches, spare)

    def __call__(self, caches: Sequence[Tensor], tiles: Sequence[Oldest]) -> None:
        """Pack ``tiles`` into ``caches``, uint8 [blocks, bytes] of every layer."""
        most = _SIZES[-1] if self.captured else max(len(tiles), 1)
        for start in range(0, len(tiles), most):
            part = tiles[start : start + most]
            size = next((n for n in _SIZES if n >= len(part)), len(part)) if self.captured else len(part)
            padded = [*part, *[part[0]] * (size - len(part))]
            numbers = on_device([[t.slot, t.packed, t.block] for t in padded], self.exact.keys.device).T.contiguous()
            if self.captured:
                self._replay(caches, numbers)
            else:
                self._pack(caches, numbers)

    def _replay(self, caches: Sequence[Tensor], numbers: Tensor) -> None:
        found = self._graph(caches, numbers)
        found.numbers.copy_(numbers)
        found.graph.replay()

    def _graph(self, caches: Sequence[Tensor], numbers: Tensor) -> _Captured:
        """The graph of as many tiles as ``numbers`` are of."""
        where, size = tuple(cache.data_ptr() for cache in caches), numbers.shape[1]
        found = self._graphs.get(size)
        if found is None or found.where != where:
            found = self._graphs[size] = self._capture(caches, numbers, where)
        return found

    def _capture(self, caches: Sequence[Tensor], numbers: Tensor, where: tuple[int, ...]) -> _Captured:
        """A graph of packing; what runs before it packs these numbers already, to the bytes that the graph writes."""
        kept = numbers.clone()
        graph = captured(lambda: self._pack(caches, kept), kept.device, warm=1, mode="thread_local")
        return _Captured(graph, kept, where)

    def _pack(self, caches: Sequence[Tensor], numbers: Tensor) -> None:
        slots, packed, blocks = numbers
        tile = self.form.layers[0].layer.rule.tile
        for layer, fused in enumerate(self.form.layers):
            keys, values, received = self.exact.oldest(layer, slots, packed, tile)
            rows: Mapping[Any, Tensor] = {"k": keys, "v": values}
            tiles = fused.layer.encode(rows, received, 0)
            caches[layer][blocks, : tiles.shape[2]] = tiles[:, 0]
