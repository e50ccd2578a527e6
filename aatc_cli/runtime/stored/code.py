"""How the rows of a chunk become bytes: one interface for all codes, and the fixed-width code of tiles.

A code sees a whole chunk at once, all layers of it, so one that predicts a layer from the one below has what it needs.
A code of fixed width says beforehand how many bytes every layer takes; one of variable rate does not, and the head of
the chunk has the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.tiles.layer import TileLayer

Rows = Mapping[Side, Tensor]
Biases = Sequence[Mapping[Side, Tensor | None]]


class ChunkCode(Protocol):
    """A code of chunks. Rows are [L, n, C] in float32, keys in the plan's coordinates, bias included.

    layers: by which tokens are ranked where nobody saw what attention they received. by_tile: bytes are those of one
    tile after another, so that neighbouring chunks may be coded together.
    """

    layers: Sequence[TileLayer]
    by_tile: bool

    @property
    def orders(self) -> int:
        """Orders in which the tokens of a layer are ranked; 0 where they are not."""
        ...

    def sizes(self, tokens: int) -> list[int] | None:
        """Bytes of every layer of ``tokens`` tokens; None where they depend on the tokens."""
        ...

    def encode(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """Bytes of every layer, uint8 [m] each. received [L, orders, n] ranks tokens; ``first``: position of one."""
        ...

    def decode(self, parts: Sequence[Tensor], tokens: int) -> dict[Side, Tensor]:
        """The rows of ``tokens`` tokens from the bytes of every layer."""
        ...


class TileCode:
    """Tiles of 64 tokens, as a live cache packs them (`core.tile_packing`); a plan without classes has one class."""

    by_tile = True

    def __init__(self, layers: Sequence[TileLayer]) -> None:
        self.layers: Sequence[TileLayer] = list(layers)

    @classmethod
    def of(cls, codecs: Sequence[Mapping[Side, object]], biases: Biases, heads: int) -> TileCode:
        """Of the codecs of a plan; raises `AatcError` for a plan whose codes are no tiles, or that hides tokens.

        A class without bits in a head is left out of that head's attention in a live cache, and pages cannot say so.
        """
        made = []
        for layer, (pair, bias) in enumerate(zip(codecs, biases, strict=True)):
            tiled: dict[Side, TileCodec] = {side: _tiled(pair[side]) for side in SIDES}
            made.append(TileLayer(layer, tiled, bias, tiled["k"].rule, heads))
        hiding = sum(layer.dropped is not None for layer in made)
        if hiding:
            raise AatcError(
                f"in {hiding} of {len(made)} layers the plan leaves tokens out of a head's attention, which pages "
                "cannot say",
                "plan at more bits, with lowest_bits in the recipe, or by loss-aware-chunks",
            )
        return cls(made)

    @property
    def orders(self) -> int:
        """Orders of a layer, 0 in a plan of one class."""
        rule = self.layers[0].rule
        return rule.orders(self.layers[0].heads) if rule.classes > 1 else 0

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of every layer."""
        return [layer.held.nbytes * (tokens // layer.rule.tile) for layer in self.layers]

    def encode(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """Tiles of every layer, one after another."""
        found = []
        for layer, ranked in zip(self.layers, received, strict=True):
            mine = {side: rows[side][layer.layer][None] for side in SIDES}
            found.append(layer.encode(mine, ranked[None], first).flatten())
        return found

    def decode(self, parts: Sequence[Tensor], tokens: int) -> dict[Side, Tensor]:
        """Rows as attention would read them, but for the rotation."""
        made: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
        for layer, part in zip(self.layers, parts, strict=True):
            read = layer.read(part.view(1, tokens // layer.rule.tile, -1))
            made["k"].append(read.keys[0].transpose(0, 1).flatten(1))
            made["v"].append(read.values[0].transpose(0, 1).flatten(1))
        return {side: torch.stack(made[side]) for side in SIDES}


def _tiled(codec: object) -> TileCodec:
    if isinstance(codec, TileCodec):
        return codec
    if isinstance(codec, TransformCodec):
        return TileCodec(codec, codec.bits[None], TileRule((TILE,), "layer"))
    raise AatcError(
        f"a {type(codec).__name__} has no chunks of fixed size", "store caches of a plan whose recipe is packed"
    )
