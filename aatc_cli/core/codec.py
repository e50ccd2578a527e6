"""A codec of one site: what a cached vector becomes after encode, quantize, dequantize, decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.core import quantizer
from aatc_cli.core.transform import decode, encode


class Codec(Protocol):
    """Anything that can say what the compressed cache gives back for the vectors put into it."""

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        ...


@dataclass(frozen=True)
class TransformCodec:
    """Linear transform and scalar quantizer of one site. encode, decode [groups, E, E]; scale, bits, variance [C]."""

    encode: Tensor
    decode: Tensor
    scale: Tensor
    bits: Tensor
    variance: Tensor

    @property
    def groups(self) -> int:
        """Head groups, each with its own token scale."""
        return int(self.encode.shape[0])

    def latents(self, x: Tensor) -> Tensor:
        """Transform coefficients of ``x`` [..., C] in the dtype of the codec."""
        return encode(x.to(self.encode.dtype), self.encode)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode, quantize with a per-token scale, and decode ``x`` [..., C]."""
        h = self.latents(x)
        alpha = quantizer.token_scale(h, self.scale, self.bits, self.groups)
        codes = quantizer.quantize(h, alpha, self.scale, self.bits)
        return decode(quantizer.dequantize(codes, alpha, self.scale, self.bits), self.decode).to(x.dtype)

    def noise(self, x: Tensor) -> Tensor:
        """Modelled variance of the latent error of every token of ``x``: [..., C]."""
        alpha = quantizer.token_scale(self.latents(x), self.scale, self.bits, self.groups)
        return quantizer.noise_variance(alpha, self.scale, self.bits, self.variance)

    def with_bits(self, bits: Tensor) -> TransformCodec:
        """The same transform at other widths [C]."""
        return TransformCodec(self.encode, self.decode, self.scale, bits, self.variance)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> TransformCodec:
        """Move to a device, matrices and scales in ``dtype``."""
        return TransformCodec(
            self.encode.to(device, dtype), self.decode.to(device, dtype), self.scale.to(device, dtype),
            self.bits.to(device), self.variance.to(device, dtype),
        )  # fmt: skip


@dataclass(frozen=True)
class CastCodec:
    """The uncompressed reference: a cache held in ``dtype``."""

    dtype: torch.dtype = torch.float16

    def reconstruct(self, x: Tensor) -> Tensor:
        """Round ``x`` to the cache's dtype and back."""
        return x.to(self.dtype).to(x.dtype)
