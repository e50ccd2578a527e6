"""Codes of one head group of one side in whole tiles: the quantizer of every class on the tokens of that class."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.errors import AatcError

# codes u >= 0 [..., q, E] int64 and scales [..., q] float16 of the q tokens of a class in every tile
Coded = tuple[Tensor, Tensor]


class UnitCode:
    """The quantizers of one head group: ``group`` of ``site``. encode, decode [E, E]: its transform.

    Raises `AatcError` for codes about a mean.
    """

    def __init__(self, site: TileCodec, group: int) -> None:
        codec, self.rule = site.codec, site.rule
        if codec.centre is not None:
            raise AatcError("predicted codes are about zero", "plan with a recipe whose transform takes no mean off")
        size = int(codec.encode.shape[1])
        span = slice(group * size, (group + 1) * size)
        weight = codec.weight
        alone = replace(
            codec,
            encode=codec.encode[group : group + 1],
            decode=codec.decode[group : group + 1],
            scale=codec.scale[span],
            bits=codec.bits[span],
            variance=codec.variance[span],
            weight=None if weight is None else weight[span],
        )
        self.encode, self.decode = codec.encode[group], codec.decode[group]
        # None where a class has no bits: nothing is looked at on the device later
        self.quantizers: list[TransformCodec | None] = [
            alone.with_bits(bits[span]) if bool(bits[span].any()) else None for bits in site.bits
        ]
        self.halves = [_half(bits[span]) for bits in site.bits]

    @property
    def coded(self) -> bool:
        """Whether any class has bits."""
        return any(quantizer is not None for quantizer in self.quantizers)

    def quantize(self, latents: Tensor, rows: Tensor) -> list[Coded | None]:
        """Codes of every class, from latents [..., t, E] of whole tiles; None of classes without bits.

        rows [..., t]: the place in the tile of every row, rows lying by class (`core.tile_classes.rows_of`).
        """
        if not self.coded:
            return [None] * len(self.quantizers)
        ranked = latents.gather(-2, rows[..., None].expand_as(latents))
        found: list[Coded | None] = []
        parts = torch.split(ranked, list(self.rule.quotas), -2)
        for quantizer, half, mine in zip(self.quantizers, self.halves, parts, strict=True):
            if quantizer is None:
                found.append(None)
                continue
            codes, alpha = quantizer.quantize(mine)
            found.append((codes.to(torch.int64) + half, alpha[..., 0]))
        return found

    def dequantize(self, coded: list[Coded | None], rows: Tensor) -> Tensor | None:
        """Latents [..., t, E] of codes, tokens by place; None where no class has bits: all are zero."""
        if not self.coded:
            return None
        size = self.encode.shape[0]
        ranked = []
        for quantizer, half, quota, part in zip(self.quantizers, self.halves, self.rule.quotas, coded, strict=True):
            if quantizer is None or part is None:
                ranked.append(self.encode.new_zeros(*rows.shape[:-1], quota, size))
            else:
                codes, alpha = part
                ranked.append(quantizer.dequantize((codes - half).to(torch.int32), alpha[..., None]))
        by_row = torch.cat(ranked, -2)
        return torch.zeros_like(by_row).scatter_(-2, rows[..., None].expand_as(by_row), by_row)


def _half(bits: Tensor) -> Tensor:
    """2^(w-1) of every channel, 0 without bits."""
    return ((1 << bits.to(torch.int64)) >> 1).masked_fill(bits == 0, 0)
