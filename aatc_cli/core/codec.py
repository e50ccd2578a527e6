"""A codec of one site: what a cached vector becomes after encode, quantize, dequantize, decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from aatc_cli.core import lloyd, quantizer
from aatc_cli.core.casting import saturated
from aatc_cli.core.moving import moved
from aatc_cli.core.transform import decode, encode
from aatc_cli.errors import AatcError


class Codec(Protocol):
    """Anything that can say what the compressed cache gives back for the vectors put into it."""

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        ...


@dataclass(frozen=True)
class TransformCodec:
    """Linear transform and scalar quantizer of one site. encode, decode [groups, E, E]; scale, bits, variance [C].

    restored: share of what coding takes off the size of a latent that reading gives back (`core.curves.restored`).
    centre [C]: what latents are coded about; a channel without bits is read as its centre. None: about zero.
    widths: ``bits`` as numbers, where they are known without asking a GPU, which would have to be waited for.
    """

    encode: Tensor
    decode: Tensor
    scale: Tensor
    bits: Tensor
    variance: Tensor
    quantizer: Literal["uniform-token-max", "lloyd", "uniform"] = "uniform-token-max"
    weight: Tensor | None = None
    scale_bits: int = 16
    restored: float = 0.0
    centre: Tensor | None = None
    widths: tuple[int, ...] | None = None

    @property
    def groups(self) -> int:
        """Head groups, each with its own token scale."""
        return int(self.encode.shape[0])

    @cached_property
    def _tables(self) -> lloyd.Tables:
        return lloyd.Tables.of(self.bits, self.variance, self.quantizer == "uniform", self.restored, self.widths)

    def latents(self, x: Tensor) -> Tensor:
        """Transform coefficients of ``x`` [..., C] in the dtype of the codec."""
        return encode(x.to(self.encode.dtype), self.encode)

    def offset(self, bias: Tensor | None) -> Tensor | None:
        """What is added to vectors [C] that are read: a projection's ``bias``, and the mean that codes are about."""
        if self.centre is None:
            return bias
        mean = decode(self.centre, self.decode)
        return mean if bias is None else mean + bias.to(mean)

    def quantize(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., C] int32 and token scales [..., groups] float16 of latents ``h`` [..., C]."""
        if self.centre is not None:
            h = h - self.centre
        if self.quantizer != "uniform-token-max":
            weight = self.weight if self.weight is not None else torch.ones_like(self.variance)
            return lloyd.quantize(h, self.variance.sqrt(), self._tables, weight, self.groups, self.scale_bits)
        alpha = quantizer.token_scale(h, self.scale, self.bits, self.groups, self.scale_bits)
        return quantizer.quantize(h, alpha, self.scale, self.bits), alpha

    def dequantize(self, codes: Tensor, alpha: Tensor) -> Tensor:
        """Latents [..., C] of codes and token scales."""
        if self.quantizer != "uniform-token-max":
            found = lloyd.dequantize(codes, alpha, self.variance.sqrt(), self._tables)
        else:
            found = quantizer.dequantize(codes, alpha, self.scale, self.bits)
        return found if self.centre is None else found + self.centre

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode, quantize with a per-token scale, and decode ``x`` [..., C]."""
        return saturated(decode(self.dequantize(*self.quantize(self.latents(x))), self.decode), x.dtype)

    def noise(self, x: Tensor) -> Tensor:
        """Modelled variance of the latent error of every token of ``x``: [..., C]."""
        _, alpha = self.quantize(self.latents(x))
        if self.quantizer != "uniform-token-max":
            return lloyd.noise_variance(alpha, self.variance.sqrt(), self.bits, uniform=self.quantizer == "uniform")
        return quantizer.noise_variance(alpha, self.scale, self.bits, self.variance)

    def units(self) -> tuple[Tensor, Tensor]:
        """Unit and offset [C] of evenly spaced levels: a latent is alpha unit (u - offset), u = code + 2^(b-1).

        Both are zero where a channel has no bits. Raises `AatcError` for Lloyd-Max levels, which have no unit.
        """
        if self.centre is not None:
            raise AatcError(
                "latents about a mean are read from tiles alone", "plan with a recipe whose transform has none"
            )
        if self.restored:
            raise AatcError(
                "restored levels have another unit when read", 'plan with a recipe whose quantizer is "uniform"'
            )
        if self.quantizer == "lloyd":
            raise AatcError("Lloyd-Max levels are not evenly spaced", 'plan with a recipe whose quantizer is "uniform"')
        half = self._tables.half
        if self.quantizer == "uniform":
            return self._tables.step * self.variance.sqrt(), (half - 0.5).clamp_min(0)
        unit = self.scale * torch.exp2(1.0 - self.bits.to(self.scale.dtype))
        return torch.where(self.bits > 0, unit, torch.zeros_like(unit)), half

    def with_bits(self, bits: Tensor, widths: tuple[int, ...] | None = None) -> TransformCodec:
        """The same transform at other widths [C], which ``widths`` has as numbers."""
        return replace(self, bits=bits, widths=widths)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> TransformCodec:
        """Move to a device, matrices and scales in ``dtype``."""
        known = self.widths
        if known is None and self.bits.device.type == "cpu":
            known = tuple(self.bits.tolist())
        return replace(
            self,
            encode=moved(self.encode, device, dtype),
            decode=moved(self.decode, device, dtype),
            scale=moved(self.scale, device, dtype),
            bits=moved(self.bits, device),
            variance=moved(self.variance, device, dtype),
            weight=None if self.weight is None else moved(self.weight, device, dtype),
            centre=None if self.centre is None else moved(self.centre, device, dtype),
            widths=known,
        )


@dataclass(frozen=True)
class CastCodec:
    """The uncompressed reference: a cache held in ``dtype``."""

    dtype: torch.dtype = torch.float16

    def reconstruct(self, x: Tensor) -> Tensor:
        """Round ``x`` to the cache's dtype and back."""
        return x.to(self.dtype).to(x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> CastCodec:
        """Nothing to move."""
        return self
