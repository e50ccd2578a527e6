"""The codec of one site in tiles: one transform, and the widths of every class of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.moving import moved
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.transform import decode


@dataclass(frozen=True)
class TileCodec:
    """Codes of one site for tokens of n classes, which ``rule`` tells apart.

    codec: transform and quantizer; bits [n, C] in place of its widths, and as numbers where a GPU need not be asked.
    """

    codec: TransformCodec
    bits: Tensor
    rule: TileRule
    widths: tuple[tuple[int, ...], ...] | None = None

    @property
    def classes(self) -> int:
        """Classes of tokens."""
        return int(self.bits.shape[0])

    def of_class(self, k: int) -> TransformCodec:
        """The codec of the tokens of class ``k``."""
        return self.codec.with_bits(self.bits[k], None if self.widths is None else self.widths[k])

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
            widths=None if self.widths is None else tuple(width for row in self.widths for width in row),
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

    @cached_property
    def _each(self) -> tuple[TransformCodec, ...]:
        """The codec of every class."""
        return tuple(self.of_class(k) for k in range(self.classes))

    def reconstruct_chosen(self, x: Tensor, classes: Tensor) -> Tensor:
        """What the class of each token gives back for vectors [B, P, C] of whole tiles. classes [B, orders, P].

        As `reconstruct` where only the class that a token is of is wanted: those of a class are coded together, and
        none for another. Heads with another order than their group's are coded for all classes. -> [B, P, C].
        """
        groups, orders, length = self.codec.groups, classes.shape[1], int(x.shape[1])
        if orders not in (1, groups):
            by_order = torch.unflatten(self.reconstruct(x), -1, (orders, -1))
            chosen = classes.transpose(1, 2)[None, ..., None].expand(1, *by_order.shape[1:])
            return by_order.gather(0, chosen)[0].flatten(-2)
        order = classes.argsort(dim=-1, stable=True).expand(-1, groups, -1)[..., None]
        order = order.expand(-1, -1, -1, x.shape[-1] // groups)
        latents = torch.unflatten(self.codec.latents(x), -1, (groups, -1)).transpose(1, 2).gather(2, order)
        counts = [quota * (length // self.rule.tile) for quota in self.rule.quotas]
        parts = []
        for codec, part in zip(self._each, torch.split(latents, counts, 2), strict=True):
            rows = part.transpose(1, 2).flatten(2)
            coded = codec.dequantize(*codec.quantize(rows))
            parts.append(torch.unflatten(coded, -1, (groups, -1)).transpose(1, 2))
        found = torch.empty_like(latents).scatter_(2, order, torch.cat(parts, 2)).transpose(1, 2).flatten(2)
        return saturated(decode(found, self.codec.decode), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> TileCodec:
        """Move to a device, matrices and scales in ``dtype``."""
        known = self.widths
        if known is None and self.bits.device.type == "cpu":
            known = tuple(tuple(row) for row in self.bits.tolist())
        return TileCodec(self.codec.to(device, dtype), moved(self.bits, device), self.rule, known)
