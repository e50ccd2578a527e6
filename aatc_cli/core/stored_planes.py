"""Codes of a layer of a chunk as bytes of fixed size: planes of digits and token scales, as in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.stored_layer import LayerCodes, StoredLayer
from aatc_cli.core.tile_classes import class_bits, pack_classes, unpack_classes
from aatc_cli.core.tile_packing import Part, digits_of
from aatc_cli.core.unit_code import Coded
from aatc_cli.errors import AatcError


class LayerPlanes:
    """How one layer's codes lie in a chunk. ``heads``: kv heads, which may rank tokens each by itself."""

    def __init__(self, layer: StoredLayer, heads: int) -> None:
        self.rule, self.orders = layer.rule, layer.rule.orders(heads)
        self.device = layer.codes[0].encode.device
        self.sizes = [int(code.encode.shape[0]) for code in layer.codes]
        self.parts: list[list[Part | None]] = [
            [self._part(layer, place, k) for k in range(self.rule.classes)] for place in range(len(layer.units))
        ]
        self.tags = self.orders * class_bits(self.rule.classes) * self.rule.tile // 8

    def nbytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens of whole tiles."""
        coded = sum(sum(part.sizes()) for unit in self.parts for part in unit if part is not None)
        return tokens // self.rule.tile * (self.tags + coded)

    def pack(self, codes: LayerCodes, classes: Tensor) -> bytes:
        """Bytes of the codes and classes [orders, T] of a chunk."""
        pieces = [self._tags(classes)]
        for parts, unit in zip(self.parts, codes.units, strict=True):
            for part, coded in zip(parts, unit, strict=True):
                if part is not None:
                    assert coded is not None
                    pieces.append(torch.cat(part.pack(*coded), -1).flatten())
        return torch.cat(pieces).cpu().numpy().tobytes()

    def unpack(self, data: bytes, tokens: int) -> tuple[LayerCodes, Tensor]:
        """Codes and classes [orders, T]; raises `AatcError` for bytes of another size."""
        if len(data) != self.nbytes(tokens):
            raise AatcError("the bytes of a layer are not those of this plan", "store the prefix again")
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device) if data else torch.empty(0)
        tiles = tokens // self.rule.tile
        start = tiles * self.tags
        classes, units = self._classes(held[:start], tiles), []
        for parts, size in zip(self.parts, self.sizes, strict=True):
            found: list[Coded | None] = []
            for part in parts:
                if part is None:
                    found.append(None)
                    continue
                stop = start + tiles * sum(part.sizes())
                found.append(part.unpack(held[start:stop].view(tiles, -1), size))
                start = stop
            units.append(found)
        return LayerCodes(units), classes

    def _part(self, layer: StoredLayer, place: int, k: int) -> Part | None:
        """Where the digits of one unit in one class lie, in one tile; None without bits."""
        quantizer = layer.codes[place].quantizers[k]
        if quantizer is None:
            return None
        widths = quantizer.bits.cpu()
        digits = digits_of(widths, 2, quantizer.bits.device), digits_of(widths, 1, quantizer.bits.device)
        return Part(0, 0, digits, self.rule.quotas[k], quantizer.scale_bits)

    def _tags(self, classes: Tensor) -> Tensor:
        """Classes [orders, T] as bytes, tile by tile."""
        by_tile = torch.unflatten(classes, -1, (-1, self.rule.tile)).transpose(0, 1)
        return pack_classes(by_tile, self.rule.classes).flatten()

    def _classes(self, data: Tensor, tiles: int) -> Tensor:
        """Inverse of `_tags`."""
        if self.rule.classes == 1:
            return torch.zeros(self.orders, tiles * self.rule.tile, dtype=torch.int64, device=self.device)
        found = unpack_classes(data.view(tiles, self.orders, -1), self.rule.classes)
        return found.transpose(0, 1).flatten(1)
