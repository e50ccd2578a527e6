"""Codes of a layer of a chunk as bytes of fixed size: planes of digits and token scales, as in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.stored_layer import LayerCodes, StoredLayer
from aatc_cli.core.stored_tags import Tags
from aatc_cli.core.tile_digits import digits_of
from aatc_cli.core.tile_packing import Part
from aatc_cli.core.unit_code import Coded, UnitCode
from aatc_cli.errors import AatcError


class LayerPlanes:
    """How one layer's codes lie in a chunk. ``heads``: kv heads, which may rank tokens each by itself."""

    def __init__(self, layer: StoredLayer, heads: int) -> None:
        self.rule, self.tags = layer.rule, Tags(layer.rule, heads)
        self.device = layer.codes[0].encode.device
        self.sizes = [int(code.encode.shape[0]) for code in layer.codes]
        self.parts: list[list[Part | None]] = [
            [self._part(layer, place, k) for k in range(self.rule.classes)] for place in range(len(layer.units))
        ]

    def nbytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens of whole tiles."""
        coded = sum(sum(part.sizes()) for unit in self.parts for part in unit if part is not None)
        tiles = tokens // self.rule.tile
        return self.tags.nbytes(tiles) + tiles * coded

    def bits(self, codes: LayerCodes, tokens: int) -> float:
        """Bits that `pack` takes."""
        return 8.0 * self.nbytes(tokens)

    def pack(self, codes: LayerCodes, classes: Tensor) -> bytes:
        """Bytes of the codes and classes [orders, T] of a chunk."""
        pieces: list[Tensor] = []
        for parts, unit in zip(self.parts, codes.units, strict=True):
            for part, coded in zip(parts, unit, strict=True):
                if part is not None:
                    assert coded is not None
                    pieces.append(torch.cat(part.pack(*coded), -1).flatten())
        found: bytes = torch.cat(pieces).cpu().numpy().tobytes() if pieces else b""
        return self.tags.pack(classes) + found

    def unpack(self, data: bytes, tokens: int) -> tuple[LayerCodes, Tensor]:
        """Codes and classes [orders, T]; raises `AatcError` for bytes of another size."""
        if len(data) != self.nbytes(tokens):
            raise AatcError("the bytes of a layer are not those of this plan", "store the prefix again")
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device) if data else torch.empty(0)
        tiles = tokens // self.rule.tile
        start = self.tags.nbytes(tiles)
        classes, units = self.tags.unpack(data[:start], tiles).to(self.device), []
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
        code = layer.codes[place]
        assert isinstance(code, UnitCode)
        quantizer = code.quantizers[k]
        if quantizer is None:
            return None
        widths = quantizer.bits.cpu()
        digits = digits_of(widths, 2, quantizer.bits.device), digits_of(widths, 1, quantizer.bits.device)
        return Part(0, 0, digits, self.rule.quotas[k], quantizer.scale_bits)
