"""Classes of the tokens of a chunk as bytes, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.tile_rule import TileRule, class_bits
from aatc_cli.core.tile_tags import pack_classes, unpack_classes


class Tags:
    """Of a layer whose ``heads`` kv heads may rank tokens each by itself."""

    def __init__(self, rule: TileRule, heads: int) -> None:
        self.rule, self.orders = rule, rule.orders(heads)

    def nbytes(self, tiles: int) -> int:
        """Bytes of so many tiles."""
        return tiles * self.orders * class_bits(self.rule.classes) * self.rule.tile // 8

    def pack(self, classes: Tensor) -> bytes:
        """Bytes of classes [orders, T]."""
        by_tile = torch.unflatten(classes, -1, (-1, self.rule.tile)).transpose(0, 1)
        return pack_classes(by_tile, self.rule.classes).flatten().cpu().numpy().tobytes()

    def unpack(self, data: bytes, tiles: int) -> Tensor:
        """Classes [orders, T] on the CPU."""
        if self.rule.classes == 1:
            return torch.zeros(self.orders, tiles * self.rule.tile, dtype=torch.int64)
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tiles, self.orders, -1)
        return unpack_classes(held, self.rule.classes).transpose(0, 1).flatten(1)
