"""Codecs with no table and no statistics: half and 8-bit floats, Lloyd-Max levels after the norm is taken out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.lloyd_levels import levels


@dataclass(frozen=True)
class Float8Codec:
    """An 8-bit float cache (E4M3: 4 exponent and 3 mantissa bits), saturating at 448, with scale one.

    Source: OCP "8-bit Floating Point Specification"; it is what engines call an fp8 cache without calibrated scales.
    """

    def reconstruct(self, x: Tensor) -> Tensor:
        """``x`` [..., C] rounded to the nearest 8-bit float, in the dtype of ``x``."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        return x.clamp(-largest, largest).to(torch.float8_e4m3fn).to(x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Float8Codec:
        """Nothing to move."""
        return self


@dataclass(frozen=True)
class HalfCodec:
    """Numbers held in float16."""

    def reconstruct(self, x: Tensor) -> Tensor:
        """``x`` [..., C] rounded to float16, in the dtype of ``x``; what is beyond its range is held at its end."""
        return saturated(x, torch.float16).to(x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> HalfCodec:
        """Nothing to move."""
        return self


def eight_bit(x: Tensor, group: int) -> Tensor:
    """``x`` [..., C] as signed bytes with one float16 scale for every ``group`` channels: its maximum over 127.

    The dtype is that of ``x``. A group whose scale is no positive float16 becomes zero.
    """
    wide = torch.unflatten(x.to(torch.promote_types(x.dtype, torch.float32)), -1, (-1, group))
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_max(torch.finfo(torch.float16).max).to(torch.float16)
    held = scale.to(wide.dtype)
    codes = torch.round(wide / torch.where(held > 0, held, torch.ones_like(held))).clamp(-127, 127)
    return (codes * held).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class NormedLloyd:
    """Every group of ``group`` channels of a token as its norm (float16) and the levels of a unit normal at ``bits``.

    z = x sqrt(group) / ||x|| has unit mean square; after a random rotation its entries are close to a unit normal.
    Source: TurboQuant (2504.19874) without its second, one-bit stage.
    """

    bits: int
    group: int

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        wide = torch.unflatten(x.to(torch.promote_types(x.dtype, torch.float32)), -1, (-1, self.group))
        held = saturated(wide.norm(dim=-1, keepdim=True), torch.float16).to(wide.dtype)
        root = math.sqrt(self.group)
        unit = wide * root / torch.where(held > 0, held, torch.ones_like(held))
        points = levels(self.bits).to(wide)
        nearest = points[torch.searchsorted((points[1:] + points[:-1]) / 2, unit.contiguous())]
        found: Tensor = (nearest * held / root).flatten(-2)
        return saturated(found, x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> NormedLloyd:
        """Nothing to move."""
        return self
