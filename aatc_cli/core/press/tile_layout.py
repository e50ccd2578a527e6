"""The byte law of tiles behind a press: what stays of a kv head fills tiles of its own, the last of them in part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from aatc_cli.core import SIDES
from aatc_cli.core.layout import Widths, packed_tokens
from aatc_cli.core.press.choice import kept_count, longest_share
from aatc_cli.core.tile_bytes import TileBytes
from aatc_cli.core.tile_layout import TileLayout

_MANY_BLOCKS = 1 << 14


@dataclass(frozen=True)
class PressTileLayout(TileLayout):
    """Bytes of tiles of which a press that acts at the end of a prompt leaves some tokens, others in every kv head.

    by_head[layer][head]: bytes of a tile of one head; keep, prompt and shares as of `core.press.layout.PressLayout`.
    """

    by_head: tuple[tuple[TileBytes, ...], ...] = ()
    keep: float = 1.0
    prompt: int | None = None
    shares: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, law: TileLayout, bits: Sequence[Widths], keep: float) -> Self:
        """Of the law of all tokens and widths bits[class][layer][side] [C]; without widths as if heads were alike."""
        count = law.geometry.kv_heads
        if bits:
            heads = tuple(
                tuple(_of_head(bits, layer, head, law) for head in range(count)) for layer in range(law.geometry.layers)
            )
        else:
            heads = tuple((_part(tile, count),) * count for tile in law.tiles)
        parts: dict[str, Any] = {part.name: getattr(law, part.name) for part in fields(TileLayout)}
        return cls(**parts, by_head=heads, keep=keep)

    def of_prompt(self, tokens: int, shares: Sequence[Sequence[float]] = ()) -> PressTileLayout:
        """The same behind a prompt of so many tokens, where heads keep ``shares`` [layer][head]; none: even ones."""
        found = tuple(tuple(float(share) for share in layer) for layer in shares)
        return replace(self, prompt=tokens, shares=found)

    def token_bytes(self) -> tuple[tuple[float, ...], ...]:
        """What a token of a kv head takes that stays, by layer and head."""
        return tuple(tuple(tile.total / self.rule.tile for tile in layer) for layer in self.by_head)

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, evicted ones having none."""
        shares = self.shares or ((longest_share(self.keep),) * self.geometry.kv_heads,) * self.geometry.layers
        codes = math.fsum(
            share * (tile.codes_keys + tile.codes_values)
            for layer, held in zip(self.by_head, shares, strict=True)
            for tile, share in zip(layer, held, strict=True)
        )
        return 8 * codes / (self.rule.tile * 2 * self.geometry.layers * self.geometry.channels)

    @property
    def bits_packed(self) -> float:
        """Over so many tiles that partly filled ones do not matter; all of them of a prompt."""
        return replace(self, prompt=None, keep=longest_share(self.keep))._bits_of_blocks(_MANY_BLOCKS)

    def _codes(self, packed: int) -> tuple[float, float, float]:
        found = list(self._streams(packed))
        keys = sum(count * tile.codes_keys for count, tile in found)
        values = sum(count * tile.codes_values for count, tile in found)
        return keys, values, keys + values + sum(count * tile.padding for count, tile in found)

    def _beside_codes(self, packed: int) -> dict[str, int]:
        found = list(self._streams(packed))
        stays = self.geometry.layers * self.geometry.kv_heads * math.ceil(packed / 8)
        return {
            "token_scales": round(sum(count * tile.token_scales for count, tile in found)),
            "class_tags": round(sum(count * tile.classes for count, tile in found)) + stays,
        }

    def _streams(self, packed: int) -> Iterator[tuple[int, TileBytes]]:
        """Tiles of every head of every layer: those that a prompt left of it, and those of what came later."""
        chosen = packed if self.prompt is None else min(packed_tokens(self.prompt, self.window), packed)
        later = (packed - chosen) // self.rule.tile
        for place, layer in enumerate(self.by_head):
            for head, tile in enumerate(layer):
                share = self.shares[place][head] if self.shares else None
                kept = kept_count(chosen, self.keep) if share is None else round(chosen * share)
                yield -(-kept // self.rule.tile) + later, tile


def _of_head(bits: Sequence[Widths], layer: int, head: int, law: TileLayout) -> TileBytes:
    """A tile of one kv head, which is a head group and has an order of its own."""
    dim = law.geometry.head_dim
    span = slice(head * dim, (head + 1) * dim)
    widths = {side: np.array([part[layer][side][span] for part in bits])[:, None] for side in SIDES}
    return TileBytes.of(widths, law.rule, 1, law.scale_bits)


def _part(tile: TileBytes, count: int) -> TileBytes:
    """A tile of one of ``count`` heads that are alike."""
    parts = (tile.codes_keys, tile.codes_values, tile.padding, tile.token_scales, tile.classes)
    return TileBytes(*(part / count for part in parts))
