"""Tiles as numbers: what the quantizer of each class gives back, held as it is. A simulation of packed tiles."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule


class PlainTiles:
    """One layer's tiles as float latents of both sides and the classes of the tokens, in bytes of those numbers."""

    def __init__(self, codecs: Mapping[Side, TileCodec], rule: TileRule, heads: int) -> None:
        self.codecs, self.rule = dict(codecs), rule
        self.orders, self.channels = rule.orders(heads), int(codecs["k"].bits.shape[1])
        self.dtype = codecs["k"].codec.encode.dtype
        self.nbytes = rule.tile * (2 * self.channels + self.orders) * self.dtype.itemsize

    def pack(self, latents: Mapping[Side, Tensor], classes: Tensor) -> Tensor:
        """Tiles [..., nbytes] of latents [..., t, C] of both sides and classes [..., orders, t]."""
        parts = [self._given_back(side, latents[side], classes).flatten(-2) for side in SIDES]
        whole = torch.cat([*parts, classes.to(self.dtype).flatten(-2)], -1)
        return whole.contiguous().view(torch.uint8)

    def unpack(self, data: Tensor) -> tuple[dict[Side, Tensor], Tensor]:
        """Latents [..., t, C] of both sides by place, and classes [..., orders, t], of tiles [..., nbytes]."""
        size = self.rule.tile * self.channels
        keys, values, classes = torch.split(
            data.contiguous().view(self.dtype), [size, size, self.rule.tile * self.orders], -1
        )
        found: dict[Side, Tensor] = {
            "k": torch.unflatten(keys, -1, (self.rule.tile, -1)),
            "v": torch.unflatten(values, -1, (self.rule.tile, -1)),
        }
        return found, torch.unflatten(classes, -1, (self.orders, -1)).to(torch.int64)

    def _given_back(self, side: Side, latents: Tensor, classes: Tensor) -> Tensor:
        codec = self.codecs[side]
        groups = codec.codec.groups
        by_group = classes.expand(*classes.shape[:-2], groups, -1).transpose(-1, -2)
        out = torch.zeros_like(latents)
        for k in range(self.rule.classes):
            quantizer = codec.of_class(k)
            member = (by_group == k).repeat_interleave(self.channels // groups, -1)
            out = torch.where(member, quantizer.dequantize(*quantizer.quantize(latents)), out)
        return out
