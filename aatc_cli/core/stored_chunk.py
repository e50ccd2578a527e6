"""A chunk of whole tiles over all layers as bytes: a length table, then layer after layer.

    chunk = tokens | checksum of the entropy code's tables | bytes of every layer | layer 0 | layer 1 | ...

The numbers in front are uint32.

    layer = classes of every tile | unit after unit, class after class: planes and scales of all tiles

A layer is decoded from those below it, so a chunk is read from the lowest layer up. How codes lie in a tile's planes is
as in `core.tile_packing`; units and classes follow one another over all tiles of the chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from aatc_cli.core.entropy_coder import tables_digest
from aatc_cli.core.stored_layer import AnyCodes, LayerCodes, StoredLayer
from aatc_cli.core.stored_planes import LayerPlanes
from aatc_cli.core.stored_rate import RateControl
from aatc_cli.core.stored_stream import LayerStream, unpacked_streams
from aatc_cli.errors import AatcError


class StoredCode:
    """All layers of a plan: vectors of chunks of tokens to bytes and back. ``heads``: kv heads of a layer."""

    def __init__(self, layers: Sequence[StoredLayer], heads: int) -> None:
        self.layers, self.heads = list(layers), heads
        self.rule = self.layers[0].rule
        self.depth = max(layer.maps.layers for layer in self.layers)
        self.packings: list[LayerPlanes | LayerStream] = [
            LayerStream(layer, heads) if layer.variable else LayerPlanes(layer, heads) for layer in self.layers
        ]
        self.variable = any(layer.variable for layer in self.layers)

    def encode(self, rows: Sequence[Tensor], classes: Sequence[Tensor]) -> bytes:
        """Bytes of a chunk. rows[layer] [T, 2 C] float32: keys before RoPE beside values, biases removed.

        classes[layer] [orders, T]. Raises `AatcError` unless T is a number of whole tiles.
        """
        tokens = int(rows[0].shape[0])
        self.check(tokens)
        parts = self.parts(rows, classes)
        return struct.pack(f"<{2 + len(parts)}I", tokens, self._tables, *map(len, parts)) + b"".join(parts)

    def parts(self, rows: Sequence[Tensor], classes: Sequence[Tensor]) -> list[bytes]:
        """Bytes of every layer; codes without a fixed size take those of their plan."""
        below: list[Tensor] = []
        found = []
        control = RateControl(self.layers, self.heads, int(rows[0].shape[0])) if self.variable else None
        for place, (layer, packing) in enumerate(zip(self.layers, self.packings, strict=True)):
            mine, told = rows[place], classes[place]
            if isinstance(packing, LayerStream):
                assert control is not None
                cells, decoded = control.encode(place, mine, below, told)
                found.append(packing.pack(cells, told))
            else:
                codes, decoded = layer.encode(mine, below, told)
                assert isinstance(codes, LayerCodes)
                found.append(packing.pack(codes, told))
            below = [decoded, *below][: self.depth]
        return found

    def decode(self, data: bytes) -> tuple[list[Tensor], list[Tensor]]:
        """Vectors [T, 2 C] and classes [orders, T] of every layer; raises `AatcError` for bytes that are no chunk."""
        tokens, parts = self._split(data)
        return self.read(parts, tokens)

    def read(self, parts: Sequence[bytes], tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """As `decode`, from the bytes of every layer; streams of symbols are read all together."""
        unpacked = unpacked_streams(self.packings, parts, tokens) if self.variable else None
        below: list[Tensor] = []
        rows: list[Tensor] = []
        classes: list[Tensor] = []
        for place, (layer, packing) in enumerate(zip(self.layers, self.packings, strict=True)):
            codes: AnyCodes
            if unpacked is not None:
                codes, told = unpacked[place]
            else:
                assert isinstance(packing, LayerPlanes)
                codes, told = packing.unpack(parts[place], tokens)
            decoded = layer.decode(codes, below, told)
            rows.append(layer.placed(decoded))
            classes.append(told)
            below = [decoded, *below][: self.depth]
        return rows, classes

    @property
    def _tables(self) -> int:
        """Checksum of the likelihoods that symbols are coded under; 0 of codes of fixed size."""
        return tables_digest() if self.variable else 0

    def check(self, tokens: int) -> None:
        """Raise `AatcError` unless ``tokens`` are whole tiles."""
        if tokens < 1 or tokens % self.rule.tile:
            raise AatcError(
                f"{tokens} tokens are not whole tiles of {self.rule.tile}", "store as many tokens as tiles hold"
            )

    def _split(self, data: bytes) -> tuple[int, list[bytes]]:
        """Tokens, and the bytes of every layer."""
        head = 4 * (2 + len(self.layers))
        wrong = AatcError("these bytes are no chunk of this plan", "store the prefix again")
        if len(data) < head:
            raise wrong
        tokens, tables, *sizes = struct.unpack(f"<{2 + len(self.layers)}I", data[:head])
        if tables != self._tables:
            raise AatcError("these codes were written under other likelihoods", "store the prefix again")
        if head + sum(sizes) != len(data) or not tokens or tokens % self.rule.tile:
            raise wrong
        parts, start = [], head
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return tokens, parts
