"""The fused form of tiles: stores of records that a Hopper kernel decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.core import SIDES
from aatc_cli.runtime.fused_tiles.shared import FusedTilesShared, FusedTilesStatic
from aatc_cli.runtime.fused_tiles.store import FusedTileStore
from aatc_cli.runtime.packed.form import codec_facts
from aatc_cli.runtime.store import Coordinates, Kind, Store


@dataclass(frozen=True)
class FusedTilesForm(FusedTilesStatic):
    """Stores of tiles in records, of one model and plan."""

    kind: Kind = "fused"
    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every layer, which share their counters; with ``room`` they never grow beyond it."""
        shared = FusedTilesShared(self, batch)
        return [FusedTileStore(shared, place, batch, room) for place in range(len(self.layers))]

    def facts(self) -> list[Any]:
        """The rule of the classes, and transforms, scales, widths and quantizer of every codec."""
        rule = self.layers[0].layer.rule
        codecs = [fused.layer.codecs[side] for fused in self.layers for side in SIDES]
        widths = [codec.bits.tolist() for codec in codecs]
        facts = codec_facts([codec.codec for codec in codecs])
        return ["fused", [*rule.quotas], rule.order, rule.ranked_by, widths, facts]
