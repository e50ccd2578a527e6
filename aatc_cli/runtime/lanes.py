"""Caches that decode side by side in one batch: which sequences are whose, and what each has to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.core.layout import packed_tokens
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.simulated.store import SimulatedStore
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.store import Coordinates
from aatc_cli.runtime.tiles.store import TileStore


@dataclass
class Lane:
    """One cache in the batch: its sequences are ``rows``. done: packed tokens that were taken over; fed: tokens in it.

    A simulated cache is told rows that the steps have written (`InPlaceSteps.tell`). One of tiles ranks its tokens by
    what they receive, so it has to read the tokens itself.
    """

    session: Session
    cache: Any
    rows: slice
    fed: int
    done: int = 0

    @property
    def stores(self) -> list[Any]:
        """The stores of all layers, whose sequences are of one length; none of the model's own cache."""
        if not isinstance(self.cache, HostedCache):
            return []
        state: Any = self.cache.state
        [group] = state.groups
        stores: list[Any] = group.stores
        return stores

    @property
    def compressed(self) -> list[Any]:
        """Of them those that pack tokens."""
        return [store for store in self.stores if not isinstance(store, SlidingStore)]

    @property
    def reads(self) -> bool:
        """Whether the cache has to read every token itself."""
        return any(isinstance(store, TileStore) for store in self.stores)

    @property
    def coordinates(self) -> Coordinates:
        """Of the keys that its stores hold."""
        return "pre-rope" if self.session.spec is None else self.session.spec.form.coordinates

    def moves(self, cached: int) -> bool:
        """Whether the token behind ``cached`` ones pushes others out of the window."""
        if self.session.spec is None:
            return False
        window = self.session.spec.window
        return packed_tokens(cached + 1, window) > packed_tokens(cached, window)


def can_step(session: Session, cache: Any) -> bool:
    """Whether the model's attention and the cache's stores are of a kind that can be read in place."""
    plain = all(
        layer.sinks is None and layer.softcap is None for layer in session.layers if isinstance(layer, AttentionSite)
    )
    kinds = (SimulatedStore, TileStore, SlidingStore)
    return plain and all(isinstance(store, kinds) for store in Lane(session, cache, slice(0), 0).stores)
