"""The codec of one site in tiles: one transform, and the widths of every class of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.transform import decode


@dataclass(frozen=True)
class TileCodec:
    """Codes of one site for tokens of n classes, which ``rule`` tells apart.

    codec: transform and quantizer; bits [n, C] in place of its widths.
    """

    codec: TransformCodec
    bits: Tensor
    rule: TileRule

    @property
    def classes(self) -> int:
        """Classes of tokens."""
        return int(self.bits.shape[0])

    def of_class(self, k: int) -> TransformCodec:
        """The codec of the tokens of class ``k``."""
        return self.codec.with_bits(self.bits[k])

    def coded(self) -> Tensor:
        """Whether tokens of a class have any bit in a head group: bool [n, groups]."""
        return torch.unflatten(self.bits, -1, (self.codec.groups, -1)).any(-1)

    @cached_property
    def _all(self) -> TransformCodec:
        """The quantizers of all classes side by side, as one of n C channels and n groups of each."""
        codec, count = self.codec, self.classes
        return replace(
            codec,
            encode=codec.encode.repeat(count, 1, 1),
            scale=codec.scale.repeat(count),
            bits=self.bits.flatten(),
            variance=codec.variance.repeat(count),
            weight=None if codec.weight is None else codec.weight.repeat(count),
            centre=None if codec.centre is None else codec.centre.repeat(count),
        )

    def reconstruct(self, x: Tensor) -> Tensor:
        """What each class would give back for vectors [..., C], as ``x`` is held: [n, ..., C]. Encoded once."""
        h = self.codec.latents(x)
        wide = h.unsqueeze(-2).expand(*h.shape[:-1], self.classes, h.shape[-1]).flatten(-2)
        coded = self._all.dequantize(*self._all.quantize(wide))
        by_class = torch.unflatten(coded, -1, (self.classes, -1)).movedim(-2, 0)
        return saturated(decode(by_class, self.codec.decode), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> TileCodec:
        """Move to a device, matrices and scales in ``dtype``."""
        return TileCodec(self.codec.to(device, dtype), self.bits.to(device), self.rule)
