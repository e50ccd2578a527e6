"""Single steps of a whole model over tokens as live caches hold them, at fixed places: one captured graph on a GPU.

What a cache gives back of packed tokens changes only when the window moves. Between two moves a step reads the same
rows and writes one, so the rows lie rotated in buffers, and a step is a few kernels a layer however the cache packs
them. Caches of several methods stand side by side in one batch: a step costs one of them hardly less than all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.rope import apply_rope
from aatc_cli.models.adapter import AttentionLayer, AttentionSite
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.captured import captured
from aatc_cli.runtime.lanes import Lane
from aatc_cli.runtime.session import attend
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.tiles.layer import TileRows
from aatc_cli.runtime.tiles.store import TileStore

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]


class InPlaceRows:
    """Keys and values [B, H, room, D] of every layer as they are read; implements `models.compressed.CacheState`.

    place [1]: where the next token is written. hidden [B, H, room]: of layers whose heads may keep nothing of a token.
    raw [B, room, C]: keys before RoPE of tokens that are written, where a cache wants them.
    """

    recording = False

    def __init__(self, prompts: Any, cached: int, room: int, copies: int) -> None:
        self.columns = cached
        self.keys, self.values = ([self._wide(part, cached, room, copies) for part in side] for side in _sides(prompts))
        self.hidden: list[Tensor | None] = [None] * len(self.keys)
        self.raw: list[Tensor | None] = [None] * len(self.keys)
        self.rotations: dict[int, Rotation] = {}
        self.place = torch.full((1,), cached, device=self.keys[0].device)
        self.places = torch.arange(room, device=self.keys[0].device)

    @staticmethod
    def _wide(rows: Tensor, cached: int, room: int, copies: int) -> Tensor:
        """``rows`` of the latest of ``cached`` tokens among ``room`` places, ``copies`` times."""
        wide = rows.new_zeros(copies * rows.shape[0], rows.shape[1], room, rows.shape[3])
        wide[:, :, cached - rows.shape[2] : cached] = rows.repeat(copies, 1, 1, 1)
        return wide

    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one step [B, Hq, 1, D] over all places so far, its own written before."""
        layer = call.site.place
        self.rotations.setdefault(layer, call.rotation)
        keys, values, raw, hidden = self.keys[layer], self.values[layer], self.raw[layer], self.hidden[layer]
        keys.index_copy_(2, self.place, call.key)
        values.index_copy_(2, self.place, call.value)
        if raw is not None:
            raw.index_copy_(1, self.place, call.k_rows)
        seen = self.places <= self.place
        if call.sliding_window is not None:
            seen = seen & (self.places > self.place - call.sliding_window)
        blind = ~seen if hidden is None else ~seen | hidden[:, :, None]
        query = torch.unflatten(call.query[:, :, 0], 1, (keys.shape[1], -1))
        weights = (query @ keys.mT * call.scaling).masked_fill(blind, float("-inf")).softmax(-1)
        return (weights @ values).flatten(1, 2)[:, :, None]

    def select(self, rows: Tensor) -> None:
        """Rows stay where they are."""

    def crop(self, count: int) -> None:
        """Nothing is taken back."""

    def reset(self) -> None:
        """Tokens stay."""


class InPlaceSteps:
    """Steps of one model over what ``lanes`` hold, caches filled by the same prompts of ``cached`` tokens."""

    def __init__(self, lanes: Sequence[Lane], prompts: Any, cached: int, room: int) -> None:
        """prompts: the model's own cache of the same prompts. room: tokens there will be in all."""
        first = lanes[0].session
        self.model: Any = first.model
        self.layers, self.lanes = first.layers, lanes
        self.rows = InPlaceRows(prompts, cached, room, len(lanes))
        batch, device = self.rows.keys[0].shape[0], self.rows.place.device
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.full((1, 1), cached, device=device)
        hosting = HostedCache(self.rows, len(self.layers))
        self.kwargs = {first.keyword: hosting, "use_cache": True, "logits_to_keep": 1}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor
        self._begin()
        for lane in lanes:
            self.refresh(lane)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Write tokens [B] of all lanes at the next place; logits [B, V] behind them, which the next step replaces."""
        self.tokens.copy_(tokens[:, None])
        if self.graph is not None:
            self.graph.replay()
        else:
            with hosted(self.model, self.layers, attend):
                self._run()
        self.rows.columns += 1
        return self.logits

    @torch.no_grad()
    def tell(self, lane: Lane) -> None:
        """Give a simulated cache the rows written since the last time, pack what the next token pushes out, take it."""
        stores, span = lane.compressed, slice(lane.fed, self.rows.columns)
        for layer, store in zip(self._compressed, stores, strict=True):
            store.append(*self._written(lane, layer.place, span))
        for store in stores:
            store.expect()
        lane.fed = self.rows.columns
        self.refresh(lane)

    @torch.no_grad()
    def refresh(self, lane: Lane) -> None:
        """Take over what the lane's cache has packed since the last time."""
        stores = lane.compressed
        packed = stores[0].packed if stores else lane.done
        if packed == lane.done:
            return
        for layer, store in zip(self._compressed, stores, strict=True):
            found = _packed_rows(store, stores, lane.done, packed, self.rows.keys[layer.place])
            self._take(lane, layer, found, store.window.sinks + lane.done)
        lane.done = packed

    @property
    def _compressed(self) -> list[AttentionLayer]:
        """The layers whose tokens are packed: the same in all lanes that pack any."""
        stores = next((lane.stores for lane in self.lanes if lane.stores), [])
        return [layer for layer, store in zip(self.layers, stores, strict=False) if not isinstance(store, SlidingStore)]

    def _written(self, lane: Lane, index: int, span: slice) -> tuple[Tensor, Tensor]:
        """Rows [b, n, C] of the tokens in ``span`` in the lane's own coordinates."""
        raw = self.rows.raw[index]
        keys, values = (part[index][lane.rows, :, span] for part in (self.rows.keys, self.rows.values))
        if lane.coordinates == "pre-rope" and raw is not None:
            return raw[lane.rows, span], values.transpose(1, 2).flatten(2)
        return keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)

    def _take(self, lane: Lane, layer: AttentionLayer, found: TileRows, first: int) -> None:
        keys, index = found.keys, layer.place
        span = slice(first, first + keys.shape[2])
        if lane.coordinates == "pre-rope":
            cos, sin = self.rows.rotations[index](self.rows.places[span])
            keys = apply_rope(keys, cos[None], sin[None], layer.rope if isinstance(layer, AttentionSite) else "none")
        self.rows.keys[index][lane.rows, :, span] = keys
        self.rows.values[index][lane.rows, :, span] = found.values
        if found.dropped is not None:
            hidden = self.rows.hidden[index]
            assert hidden is not None
            hidden[lane.rows, :, span] = found.dropped

    @torch.no_grad()
    def _begin(self) -> None:
        """One step that is not counted, to see how keys are rotated; on a GPU the graph of all others."""
        for lane in self.lanes:
            for layer, store in zip(self._compressed, lane.compressed, strict=False):
                self._want(layer.place, lane, store)
        place, position = self.rows.place.clone(), self.positions.clone()
        with hosted(self.model, self.layers, attend):
            self._run()
            if self.tokens.is_cuda:
                self.graph = captured(self._run, self.tokens.device, warm=1)
        self.rows.place.copy_(place)
        self.positions.copy_(position)

    def _want(self, index: int, lane: Lane, store: Any) -> None:
        """Make room for what a store of a layer asks for beside keys and values."""
        keys = self.rows.keys[index]
        if isinstance(store, TileStore):
            if store.layer.dropped is not None and self.rows.hidden[index] is None:
                self.rows.hidden[index] = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        elif lane.coordinates == "pre-rope" and self.rows.raw[index] is None:
            self.rows.raw[index] = keys.new_zeros(keys.shape[0], keys.shape[2], keys.shape[1] * keys.shape[3])

    def _run(self) -> None:
        self.logits = self.model(input_ids=self.tokens, position_ids=self.positions, **self.kwargs).logits[:, -1]
        self.rows.place += 1
        self.positions += 1


def _sides(prompts: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [B, H, n, D] of every layer of the model's own cache."""
    return [layer.keys for layer in prompts.layers], [layer.values for layer in prompts.layers]


def _packed_rows(store: Any, peers: Sequence[Any], first: int, last: int, like: Tensor) -> TileRows:
    """Packed tokens ``first`` to ``last`` behind the sinks, as attention reads them but for the rotation.

    like [b, H, T, D]: keys of the layer.
    """
    if isinstance(store, TileStore):
        return store.packed_rows(first, last)
    rows = store.rows(peers)
    span = slice(store.window.sinks + first, store.window.sinks + last)
    heads = [torch.unflatten(part[:, span], -1, (like.shape[1], -1)).transpose(1, 2) for part in rows]
    return TileRows(heads[0], heads[1], None)
