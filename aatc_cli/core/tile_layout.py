"""The byte law of a cache of tiles: every tile of a plan takes the same bytes, whatever text it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import HALF_BYTES, CacheLayout, Widths, exact_slots
from aatc_cli.core.site_widths import SiteWidths
from aatc_cli.core.tile_bytes import Ints, TileBytes, order_bytes
from aatc_cli.core.tile_rule import TileRule

RECEIVED_BYTES = 4  # float32


@dataclass(frozen=True)
class TileLayout(CacheLayout):
    """Bytes of a cache of tiles. ``widths`` are those of the channels that any class codes; tiles[layer]: of one tile.

    centred: latents are coded about a mean, which is kept once for every site.

    The window is flushed a tile at a time, so packed tokens are whole tiles. What tokens in the window have received so
    far is held beside them, a number of 32 bits for each order.
    """

    tiles: tuple[TileBytes, ...] = ()
    rule: TileRule = field(default_factory=lambda: TileRule((1,)))
    centred: bool = False

    @classmethod
    def of_classes(
        cls,
        geometry: Geometry,
        window: Window,
        groups: HeadGroups,
        bits: Sequence[Widths],
        rule: TileRule,
        scale_bits: int,
        expected: Sequence[float] | None = None,
    ) -> Self:
        """From the widths bits[class][layer][side] [C] of a plan; ``expected`` as of `TileBytes.of`."""
        tiles, pairs = [], []
        for layer in range(geometry.layers):
            widths: dict[Side, Ints] = {
                side: np.array([part[layer][side] for part in bits]).reshape(len(bits), groups.of(side), -1)
                for side in SIDES
            }
            tiles.append(TileBytes.of(widths, rule, geometry.kv_heads, scale_bits, expected))
            pairs.append(_widest(widths, window))
        return cls(geometry, window, groups, tuple(pairs), scale_bits, tiles=tuple(tiles), rule=rule)

    @classmethod
    def nominal_of(cls, base: CacheLayout, rule: TileRule, bits: float) -> Self:
        """At ``bits`` a number in all, before any plan exists: what the classes leave of them goes to codes."""
        geometry = base.geometry
        classes = order_bytes(rule, geometry.kv_heads)
        codes = max(bits * rule.tile * 2 * geometry.channels / 8 - classes, 0.0) / 2
        tile = TileBytes(codes, codes, 0.0, 0.0, classes)
        return cls(
            geometry, base.window, base.groups, base.widths, base.scale_bits, tiles=(tile,) * geometry.layers, rule=rule
        )

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, on average over sites and classes."""
        codes = sum(tile.codes_keys + tile.codes_values for tile in self.tiles)
        return 8 * codes / (self.rule.tile * 2 * self.geometry.layers * self.geometry.channels)

    def breakdown(self, tokens: int, batch: int = 1) -> dict[str, int]:
        """As without tiles, with ``received``: what ranks the tokens of the window once they leave it."""
        slots, layers = exact_slots(tokens, self.window)[1], self.geometry.layers
        received = slots * layers * self.rule.orders(self.geometry.kv_heads) * RECEIVED_BYTES
        return super().breakdown(tokens, batch) | {"received": batch * received}

    def _codes(self, packed: int) -> tuple[float, float, float]:
        count = packed // self.rule.tile
        keys = count * sum(tile.codes_keys for tile in self.tiles)
        values = count * sum(tile.codes_values for tile in self.tiles)
        return keys, values, keys + values + count * sum(tile.padding for tile in self.tiles)

    def _beside_codes(self, packed: int) -> dict[str, int]:
        count = packed // self.rule.tile
        return {
            "token_scales": round(count * sum(tile.token_scales for tile in self.tiles)),
            "class_tags": round(count * sum(tile.classes for tile in self.tiles)),
        }

    def static_breakdown(self) -> dict[str, int]:
        """As of one class, with widths for every class; matrices, scales and means serve all of them."""
        parts = super().static_breakdown()
        means = 2 * self.geometry.layers * self.geometry.channels * HALF_BYTES
        return parts | {"widths": self.rule.classes * parts["widths"]} | ({"means": means} if self.centred else {})


def _widest(widths: Mapping[Side, Ints], window: Window) -> tuple[SiteWidths, SiteWidths]:
    """Widths of the channels that any class codes."""
    keys, values = (SiteWidths.of(widths[side].max(0).ravel().tolist(), window.flush) for side in SIDES)
    return keys, values
