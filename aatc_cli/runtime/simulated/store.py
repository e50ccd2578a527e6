"""One layer's simulated cache: full vectors, replaced by what a codec gives back when they leave the window.

For codecs that have no packed form. It answers what a cache of theirs would; its size is the byte law's, not that of
its tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.codec import Codec
from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import debias, rebias
from aatc_cli.runtime.store import Coordinates, LayerView, StoreParts


@dataclass(frozen=True)
class SimulatedLayer:
    """The codecs of one layer, and the biases [C] that are taken off before and put back after them."""

    codecs: Mapping[Side, Codec | LayersCodec]
    biases: Mapping[Side, Tensor | None]


class SimulatedStore(StoreParts):
    """One layer of b sequences of equal length: exact rows [b, T, C], and the packed ones as the codec returns them.

    Rows are what the codec's coordinates say, with bias. ``packed`` tokens behind the sinks are read reconstructed.
    """

    NAMES = ("keys", "values", "key_hats", "value_hats")

    def __init__(self, layer: SimulatedLayer, window: Window, coordinates: Coordinates, empty: Tensor) -> None:
        self.layer, self.window, self.coordinates = layer, window, coordinates
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

    def expect(self) -> None:
        """Pack what the next token pushes out of the window, before it comes: no row of its own goes into that."""
        self.packed = max(packed_tokens(self.tokens + 1, self.window), self.packed)

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D]."""
        count, dim = int(query.shape[2]), int(query.shape[3])
        keys, values = (torch.unflatten(part, -1, (-1, dim)).transpose(1, 2) for part in self.rows(view.peers))
        if self.coordinates == "pre-rope":
            cos, sin = view.tables(0, self.tokens)
            keys = apply_rope(keys, cos[None], sin[None], view.rope)
        if fresh is not None:
            keys, values = torch.cat((keys, fresh[0]), 2), torch.cat((values, fresh[1]), 2)
        places = torch.arange(int(keys.shape[2]), device=query.device)
        distance = places[-count:, None] - places
        allowed = (distance >= 0) & (distance < (view.sliding_window or int(places.numel())))
        return masked_attention(query, keys, values, allowed, view.scaling, sinks=view.sinks, softcap=view.softcap)

    def rows(self, peers: Sequence[SimulatedStore]) -> tuple[Tensor, Tensor]:
        """Keys and values [b, T, C] as the cache holds them. ``peers``: the stores of all layers, for joint codecs."""
        self._settle(peers)
        first, last = self.window.sinks, self.window.sinks + self.packed
        found = [
            torch.cat((exact[:, :first], hats[:, : self.packed], exact[:, last:]), 1) if self.packed else exact
            for exact, hats in ((self.keys, self.key_hats), (self.values, self.value_hats))
        ]
        return found[0], found[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors, which say nothing of the method's."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name."""
        # how many tokens are packed is a width, of a tensor that holds nothing
        marks = self.keys.new_empty(self.keys.shape[0], self.packed, 0)
        return {name: getattr(self, name) for name in self.NAMES} | {"packed": marks}

    def snapshot(self) -> SimulatedStore:
        """A store in the same state; tensors are only ever replaced, so they are shared."""
        return copy.copy(self)

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        self.packed = int(tensors["packed"].shape[1])
        for name in self.NAMES:
            setattr(self, name, tensors[name])

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """No file holds a simulated cache."""
        return False

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones."""
        assert self.tokens - count >= self.least
        self.tokens -= count
        self.keys, self.values = self.keys[:, : self.tokens], self.values[:, : self.tokens]

    def _settle(self, peers: Sequence[SimulatedStore]) -> None:
        """Reconstruct what was packed since the last time, each side from its exact rows."""
        names: tuple[tuple[Side, str, str], ...] = (("k", "keys", "key_hats"), ("v", "values", "value_hats"))
        for side, rows, hats in names:
            codec = self.layer.codecs[side]
            together = peers if isinstance(codec, LayersCodec) else [self]
            done = min(int(getattr(store, hats).shape[1]) for store in together)
            span = slice(self.window.sinks + done, self.window.sinks + self.packed)
            if self.packed <= done:
                continue
            fresh = [debias(getattr(store, rows)[:, span], store.layer.biases[side]) for store in together]
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
                new = rebias(part, store.layer.biases[side])
                setattr(store, hats, torch.cat((getattr(store, hats)[:, :done], new), 1))
