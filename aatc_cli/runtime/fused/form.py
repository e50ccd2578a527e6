"""The fused form: stores of tiles that the kernels decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.core import SIDES
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.runtime.fused.shared import FusedShared
from aatc_cli.runtime.fused.static import FusedStatic
from aatc_cli.runtime.fused.store import FusedStore
from aatc_cli.runtime.packed.form import codec_facts
from aatc_cli.runtime.store import Coordinates, Kind, Store


@dataclass(frozen=True)
class FusedForm(FusedStatic):
    """Stores of tiles, of one model and plan."""

    kind: Kind = "fused"
    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every layer, which share their counters; with ``room`` they never grow beyond it."""
        tiles = max(packed_tokens(room, self.window) // TILE, 1) if room is not None else 1
        shared = FusedShared(self, batch, tiles)
        return [FusedStore(shared, place, room) for place in range(len(self.layers))]

    def facts(self) -> list[Any]:
        """Transforms, scales, widths and quantizer of every codec."""
        return ["fused", codec_facts([layer.codecs[side] for layer in self.layers for side in SIDES])]
