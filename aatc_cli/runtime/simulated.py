"""A simulated cache: full vectors in memory, replaced by what a codec gives back when they leave the window.

For codecs that have no packed form. It answers what a cache of theirs would; its size is the byte law's, not that of
its tensors. Everything that `runtime.cache` can do (batches, beams, taking steps back) it can too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import Side
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.codec import Codec
from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.layout import CacheLayout, packed_tokens
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite, ExactLayer, attention_layers, debias, geometry_of, rebias
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.layer_kinds import rope_switch
from aatc_cli.models.refusals import check_model
from aatc_cli.runtime.batch import CacheSpec, Group, Store
from aatc_cli.runtime.cache import CompressedState
from aatc_cli.runtime.sliding import SlidingStore

Coordinates = Literal["pre-rope", "post-rope"]
Codecs = Sequence[Mapping[Side, Codec | LayersCodec]]


class SimulatedStore:
    """One layer of b sequences of equal length: exact rows [b, T, C], and the packed ones as the codec returns them.

    Rows are what the codec's coordinates say, with bias. ``packed`` tokens behind the sinks are read reconstructed.
    """

    NAMES = ("keys", "values", "key_hats", "value_hats")

    def __init__(
        self,
        codecs: Mapping[Side, Codec | LayersCodec],
        biases: Mapping[Side, Tensor | None],
        window: Window,
        empty: Tensor,
    ) -> None:
        self.codecs, self.biases, self.window, self.batch = codecs, biases, window, int(empty.shape[0])
        self.packed = self.tokens = 0
        self.keys, self.values, self.key_hats, self.value_hats = (empty.clone() for _ in self.NAMES)

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: none before anything is packed."""
        return self.window.sinks + self.packed if self.packed else 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens."""
        self.keys, self.values = torch.cat((self.keys, keys), 1), torch.cat((self.values, values), 1)
        self.tokens += int(keys.shape[1])
        self.packed = max(packed_tokens(self.tokens, self.window), self.packed)

    def rows(self, peers: Sequence[SimulatedStore]) -> tuple[Tensor, Tensor]:
        """Keys and values [b, T, C] as the cache holds them. ``peers``: the stores of all layers, for joint codecs."""
        self._settle(peers)
        first, last = self.window.sinks, self.window.sinks + self.packed
        found = [
            torch.cat((exact[:, :first], hats[:, : self.packed], exact[:, last:]), 1) if self.packed else exact
            for exact, hats in ((self.keys, self.key_hats), (self.values, self.value_hats))
        ]
        return found[0], found[1]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {name: getattr(self, name) for name in self.NAMES}

    def select(self, rows: Tensor) -> SimulatedStore:
        """A store of the sequences ``rows`` (indices, any order, repeats allowed)."""
        return self._copied({name: part.index_select(0, rows.to(part.device)) for name, part in self.tensors().items()})

    def snapshot(self) -> SimulatedStore:
        """A store in the same state; tensors are only ever replaced, so they are shared."""
        return self._copied(self.tensors())

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones."""
        assert self.tokens - count >= self.least
        self.tokens -= count
        self.keys, self.values = self.keys[:, : self.tokens], self.values[:, : self.tokens]

    def _copied(self, tensors: dict[str, Tensor]) -> SimulatedStore:
        new = SimulatedStore(self.codecs, self.biases, self.window, tensors["keys"][:, :0])
        new.packed, new.tokens = self.packed, self.tokens
        for name, tensor in tensors.items():
            setattr(new, name, tensor)
        return new

    def _settle(self, peers: Sequence[SimulatedStore]) -> None:
        """Reconstruct what was packed since the last time, each side from its exact rows."""
        names: tuple[tuple[Side, str, str], ...] = (("k", "keys", "key_hats"), ("v", "values", "value_hats"))
        for side, rows, hats in names:
            codec = self.codecs[side]
            together = peers if isinstance(codec, LayersCodec) else [self]
            done = min(int(getattr(store, hats).shape[1]) for store in together)
            span = slice(self.window.sinks + done, self.window.sinks + self.packed)
            if self.packed <= done:
                continue
            fresh = [debias(getattr(store, rows)[:, span], store.biases[side]) for store in together]
            if any(part.shape[1] != self.packed - done for part in fresh):
                most = self.window.recent - self.window.flush + 1
                raise AatcError(
                    f"a codec over all layers cannot try more than {most} tokens one by one in a step",
                    "use a smaller number of candidate tokens",
                )
            if isinstance(codec, LayersCodec):
                found = list(codec.reconstruct_layers(torch.stack(fresh)))
            else:
                found = [codec.reconstruct(fresh[0])]
            for store, part in zip(together, found, strict=True):
                new = rebias(part, store.biases[side])
                setattr(store, hats, torch.cat((getattr(store, hats)[:, :done], new), 1))


@dataclass(frozen=True)
class SimulatedSpec(CacheSpec):
    """What the simulated caches of a model share."""

    codecs: Codecs = ()
    layers: tuple[AttentionSite | ExactLayer, ...] = ()
    coordinates: Coordinates = field(kw_only=True)
    device: torch.device | None = None

    def stores(self, batch: int) -> list[Store]:
        """Empty stores of every layer of the model for ``batch`` sequences."""
        channels = self.layout.geometry.channels
        empty = torch.empty(batch, 0, channels, dtype=self.dtype, device=self.device)
        # they stand in for `LayerStore` in all that `CompressedState` asks of one
        found: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, ExactLayer):
                found.append(SlidingStore(layer.sliding_window, channels, batch, self.dtype, empty.device))
            else:
                before = self.coordinates == "pre-rope"
                biases: dict[Side, Tensor | None] = {"k": None, "v": None}
                if before:
                    biases = {"k": layer.k_bias, "v": layer.v_bias}
                found.append(SimulatedStore(self.codecs[layer.layer], biases, self.window, empty))
        return found


class SimulatedState(CompressedState):
    """The contents of one simulated cache."""

    spec: SimulatedSpec

    def bytes_live(self) -> int:
        """Raises `AatcError`: the tensors of a simulated cache are not those of the method it stands for."""
        raise AatcError("a simulated cache holds full vectors", "read its method's size off the plan: aatc inspect")

    def bytes_predicted(self) -> int:
        """Raises `AatcError`, as `bytes_live`."""
        return self.bytes_live()

    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one layer, whose new tokens enter the store. -> [B, Hq, q, D], zero at padding."""
        return super().attend(self._seen(call))

    def take(self, call: CacheCall) -> None:
        """Store one layer's new tokens, of a prompt whose attention is computed elsewhere."""
        super().take(self._seen(call))

    def _seen(self, call: CacheCall) -> CacheCall:
        """The call with the rows that the codec's coordinates want."""
        if self.spec.coordinates == "pre-rope":
            return call
        return replace(call, k_rows=call.key.transpose(1, 2).flatten(2))

    def _attend_cached(
        self, call: CacheCall, group: Group, store: Any, query: Tensor, fresh: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        site, count = call.site, int(query.shape[2])
        assert isinstance(site, AttentionSite)
        peers: list[Any] = [peer for peer in group.stores if not isinstance(peer, SlidingStore)]
        rows = store.rows(peers)
        keys, values = (torch.unflatten(part, -1, (call.key.shape[1], -1)).transpose(1, 2) for part in rows)
        if self.spec.coordinates == "pre-rope":
            cos, sin = self._rotation(call, group)(0, store.tokens)
            keys = apply_rope(keys, cos[None], sin[None], site.rope)
        if fresh is not None:
            keys, values = torch.cat((keys, fresh[0]), 2), torch.cat((values, fresh[1]), 2)
        places = torch.arange(int(keys.shape[2]), device=query.device)
        distance = places[-count:, None] - places
        allowed = (distance >= 0) & (distance < (site.sliding_window or int(places.numel())))
        return masked_attention(query, keys, values, allowed, call.scaling, sinks=site.sinks, softcap=site.softcap)


@dataclass(frozen=True)
class SimulatedSession:
    """An attached model: makes empty simulated caches for it; ``keyword`` names the argument that takes one."""

    spec: SimulatedSpec
    model: nn.Module
    keyword: str

    def new_cache(self) -> HostedCache:
        """An empty cache, to be given to ``generate`` or ``forward`` as ``keyword`` inside the block."""
        return HostedCache(SimulatedState(self.spec), len(self.spec.layers))


@contextmanager
def simulated(model: nn.Module, codecs: Codecs, window: Window, coordinates: Coordinates) -> Iterator[SimulatedSession]:
    """Attach simulated caches to ``model`` while the block lasts.

    codecs: per compressed layer the codec of "k" and "v", any of `core.codec.Codec`, on the model's device. Raises
    `AatcError` when their number does not fit the model, and `UnsupportedModelError` as `session.compressed` does.
    """
    check_model(model)
    layers = attention_layers(model)
    sites = [layer for layer in layers if isinstance(layer, AttentionSite)]
    if len(codecs) != len(sites):
        raise AatcError(f"{len(codecs)} layers of codecs for a model of {len(sites)}", "use a plan of this model")
    config: Any = model.config
    geometry, parameter = geometry_of(config), next(model.parameters())
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    spec = SimulatedSpec(
        sites=(),
        window=window,
        dtype=parameter.dtype,
        limit=limit,
        layout=CacheLayout.nominal(geometry, window, HeadGroups.both(1), 16.0),
        windows=tuple(layer.sliding_window if isinstance(layer, ExactLayer) else None for layer in layers),
        switch=rope_switch(config),
        codecs=codecs,
        layers=tuple(layers),
        coordinates=coordinates,
        device=parameter.device,
    )
    with hosted(model, layers, _attend):
        yield SimulatedSession(spec, model, cache_keyword(model))


def _attend(state: CacheState, call: CacheCall) -> Tensor:
    assert isinstance(state, SimulatedState)
    return state.attend(call)
