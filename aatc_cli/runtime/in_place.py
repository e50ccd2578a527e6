"""Single steps of a whole model over tokens as a live cache holds them, at fixed places: one captured graph on a GPU.

What a cache gives back of packed tokens changes only when the window moves. Between two moves a step reads the same
rows and writes one, so the rows lie rotated in buffers, and a step is a few kernels a layer however the cache packs
them. Used to write tokens ahead, which the cache itself then reads together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from aatc_cli.core.rope import apply_rope
from aatc_cli.models.adapter import AttentionLayer, AttentionSite
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.captured import captured
from aatc_cli.runtime.session import Session, attend
from aatc_cli.runtime.simulated.store import SimulatedStore
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.store import Coordinates
from aatc_cli.runtime.tiles.layer import TileRows
from aatc_cli.runtime.tiles.store import TileStore

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]


class InPlaceRows:
    """Keys and values [B, H, room, D] of every layer as they are read; implements `models.compressed.CacheState`.

    place [1]: where the next token is written. hidden [B, H, room]: of layers whose heads may keep nothing of a token.
    """

    recording = False

    def __init__(self, prompts: Any, cached: int, room: int) -> None:
        self.columns = cached
        self.keys, self.values = ([self._wide(part, cached, room) for part in side] for side in _sides(prompts))
        self.hidden: list[Tensor | None] = [None] * len(self.keys)
        self.rotations: dict[int, Rotation] = {}
        self.place = torch.full((1,), cached, device=self.keys[0].device)
        self.places = torch.arange(room, device=self.keys[0].device)

    @staticmethod
    def _wide(rows: Tensor, cached: int, room: int) -> Tensor:
        """``rows`` of the latest of ``cached`` tokens among ``room`` places."""
        wide = rows.new_zeros(*rows.shape[:2], room, rows.shape[3])
        wide[:, :, cached - rows.shape[2] : cached] = rows
        return wide

    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one step [B, Hq, 1, D] over all places so far, its own written before."""
        layer = call.site.place
        self.rotations.setdefault(layer, call.rotation)
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.place, call.key)
        values.index_copy_(2, self.place, call.value)
        seen = self.places <= self.place
        if call.sliding_window is not None:
            seen = seen & (self.places > self.place - call.sliding_window)
        hidden = self.hidden[layer]
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
    """Steps of the model of ``session`` over what ``cache``, filled by its prompts, holds."""

    def __init__(self, session: Session, cache: Any, prompts: Any, cached: int, room: int) -> None:
        """prompts: the model's own cache of the same ``cached`` tokens. room: tokens there will be in all."""
        self.model: Any = session.model
        self.layers, self.cache = session.layers, cache
        self.coordinates: Coordinates = "pre-rope" if session.spec is None else session.spec.form.coordinates
        self.rows, self.done = InPlaceRows(prompts, cached, room), 0
        batch, device = self.rows.keys[0].shape[0], self.rows.place.device
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.full((1, 1), cached, device=device)
        hosting = HostedCache(self.rows, len(self.layers))
        self.kwargs = {session.keyword: hosting, "use_cache": True, "logits_to_keep": 1}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor
        self._begin()
        self.refresh()

    @classmethod
    def of(cls, session: Session, cache: Any, prompts: Any, cached: int, room: int) -> Self | None:
        """None where the model's attention or the cache's stores are of a kind that cannot be read so."""
        plain = all(
            layer.sinks is None and layer.softcap is None
            for layer in session.layers
            if isinstance(layer, AttentionSite)
        )
        kinds = (SimulatedStore, TileStore, SlidingStore)
        known = session.spec is None or all(isinstance(store, kinds) for store in _stores(cache))
        return cls(session, cache, prompts, cached, room) if plain and known else None

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Write tokens [B] at the next place; the logits [B, V] behind them, which the next step writes over."""
        self.tokens.copy_(tokens[:, None])
        if self.graph is not None:
            self.graph.replay()
        else:
            with hosted(self.model, self.layers, attend):
                self._run()
        self.rows.columns += 1
        return self.logits

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what the cache has packed since the last time."""
        if not isinstance(self.cache, HostedCache):
            return
        stores = _stores(self.cache)
        compressed = [store for store in stores if not isinstance(store, SlidingStore)]
        packed = compressed[0].packed
        if packed == self.done:
            return
        for layer, store in zip(self.layers, stores, strict=True):
            if not isinstance(store, SlidingStore):
                found = _packed_rows(store, compressed, self.done, packed, self.rows.keys[layer.place])
                self._take(layer, found, store.window.sinks + self.done)
        self.done = packed

    def _take(self, layer: AttentionLayer, found: TileRows, first: int) -> None:
        keys, index = found.keys, layer.place
        span = slice(first, first + keys.shape[2])
        if self.coordinates == "pre-rope":
            cos, sin = self.rows.rotations[index](self.rows.places[span])
            keys = apply_rope(keys, cos[None], sin[None], layer.rope if isinstance(layer, AttentionSite) else "none")
        self.rows.keys[index][:, :, span], self.rows.values[index][:, :, span] = keys, found.values
        if found.dropped is not None:
            hidden = self.rows.hidden[index]
            assert hidden is not None
            hidden[:, :, span] = found.dropped

    @torch.no_grad()
    def _begin(self) -> None:
        """One step that is not counted, to see how keys are rotated; on a GPU the graph of all others."""
        for index, store in enumerate(_stores(self.cache) if isinstance(self.cache, HostedCache) else []):
            if isinstance(store, TileStore) and store.layer.dropped is not None:
                keys = self.rows.keys[index]
                self.rows.hidden[index] = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        place, position = self.rows.place.clone(), self.positions.clone()
        with hosted(self.model, self.layers, attend):
            self._run()
            if self.tokens.is_cuda:
                self.graph = captured(self._run, self.tokens.device, warm=1)
        self.rows.place.copy_(place)
        self.positions.copy_(position)

    def _run(self) -> None:
        self.logits = self.model(input_ids=self.tokens, position_ids=self.positions, **self.kwargs).logits[:, -1]
        self.rows.place += 1
        self.positions += 1


def _sides(prompts: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [B, H, n, D] of every layer of the model's own cache."""
    return [layer.keys for layer in prompts.layers], [layer.values for layer in prompts.layers]


def _stores(cache: Any) -> list[Any]:
    """The stores of all layers of a cache whose sequences are of one length."""
    state: Any = cache.state
    [group] = state.groups
    stores: list[Any] = group.stores
    return stores


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
