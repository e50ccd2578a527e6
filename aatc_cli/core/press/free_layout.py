"""The byte law of tiles whose tokens a press puts into classes itself: every class of a kv head is a stream of rows.

A row of a class is 4 bytes for each plane of two-bit digits, 2 for each of one-bit digits, and the scales. Which class
a token of the prompt is of, eviction being one of them, is said for every token and kv head (``class_tags``), and the
order inside a stream is that of the text. What comes behind the prompt fills tiles by quotas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from aatc_cli.core import SIDES
from aatc_cli.core.layout import Widths, packed_tokens
from aatc_cli.core.press.tile_layout import PressTileLayout
from aatc_cli.core.tile_bytes import plane_bits, planes_of
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.core.tile_rule import class_bits

_MANY = 1 << 20


@dataclass(frozen=True)
class Row:
    """Bytes of a token of one class of a kv head: codes of keys and of values, padding of planes, scales."""

    keys: float
    values: float
    padding: float
    scales: float

    @property
    def total(self) -> float:
        """All of them: a whole number."""
        return self.keys + self.values + self.padding + self.scales


@dataclass(frozen=True)
class FreeTileLayout(PressTileLayout):
    """rows[layer][head][class]. shares [layer][head n + class], where found: of the prompt's packed tokens.

    Before any text is seen a share ``keep`` of the tokens is counted in classes of the quotas' size.
    """

    rows: tuple[tuple[tuple[Row, ...], ...], ...] = ()

    @classmethod
    def of(cls, law: TileLayout, bits: Sequence[Widths], keep: float) -> Self:
        """As of `PressTileLayout.of`."""
        base = PressTileLayout.of(law, bits, keep)
        heads, dim = law.geometry.kv_heads, law.geometry.head_dim
        rows = tuple(
            tuple(
                tuple(_row(part[layer], slice(head * dim, (head + 1) * dim), law.scale_bits) for part in bits)
                for head in range(heads)
            )
            for layer in range(law.geometry.layers)
        )
        parts: dict[str, Any] = {part.name: getattr(base, part.name) for part in fields(PressTileLayout)}
        return cls(**parts, rows=rows)

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, evicted ones having none."""
        codes = math.fsum(share * (row.keys + row.values) for share, row in self._shared())
        return 8 * codes / (2 * self.geometry.layers * self.geometry.channels)

    @property
    def room(self) -> float:
        """Bytes of a packed token of all layers without its class, at the plan's own share."""
        return math.fsum(share * row.total for share, row in replace(self, shares=())._shared())

    @property
    def bits_packed(self) -> float:
        """Over so many tokens that whole bytes of tags do not matter; all of them of a prompt."""
        return replace(self, prompt=None)._bits_of_blocks(_MANY // self.rule.tile)

    def _shared(self) -> list[tuple[float, Row]]:
        """Every class of every head with the share of the packed tokens that it has."""
        count = self.rule.classes
        found = []
        for place, heads in enumerate(self.rows):
            for head, rows in enumerate(heads):
                even = [self.keep * share for share in self.rule.shares]
                mine = self.shares[place][head * count : (head + 1) * count] if self.shares else even
                found += list(zip(mine, rows, strict=True))
        return found

    def _codes(self, packed: int) -> tuple[float, float, float]:
        chosen, later = self._split(packed)
        found = [(round(chosen * share), row) for share, row in self._shared()]
        keys, values = (math.fsum(count * getattr(row, name) for count, row in found) for name in ("keys", "values"))
        padding = math.fsum(count * row.padding for count, row in found)
        tiles = [tile for layer in self.by_head for tile in layer]
        keys += later * math.fsum(tile.codes_keys for tile in tiles)
        values += later * math.fsum(tile.codes_values for tile in tiles)
        return keys, values, keys + values + padding + later * math.fsum(tile.padding for tile in tiles)

    def _beside_codes(self, packed: int) -> dict[str, int]:
        chosen, later = self._split(packed)
        tiles = [tile for layer in self.by_head for tile in layer]
        scales = math.fsum(round(chosen * share) * row.scales for share, row in self._shared())
        bits = class_bits(self.rule.classes + 1)
        tags = self.geometry.layers * self.geometry.kv_heads * math.ceil(bits * chosen / 8)
        return {
            "token_scales": round(scales + later * math.fsum(tile.token_scales for tile in tiles)),
            "class_tags": tags + round(later * math.fsum(tile.classes for tile in tiles)),
        }

    def _split(self, packed: int) -> tuple[int, int]:
        """Packed tokens of the prompt, and tiles of what came behind it."""
        chosen = packed if self.prompt is None else min(packed_tokens(self.prompt, self.window), packed)
        return chosen, (packed - chosen) // self.rule.tile


def _row(widths: Any, span: slice, scale_bits: int) -> Row:
    """Of a class with ``widths`` by side, in the channels of one head."""
    codes, planes, scales = {}, 0.0, 0
    for side in SIDES:
        own = np.array(widths[side][span])
        codes[side] = float(own.sum()) / 8
        planes += float(plane_bits(*planes_of(own))) / 8
        scales += scale_bits * bool(own.any())
    return Row(codes["k"], codes["v"], planes - codes["k"] - codes["v"], scales / 8)
