"""Asymmetric uniform quantization of groups between their least and greatest value, along channels or along tokens.

    scale = (max - min) / (2^b - 1),   code = round((x - min) / scale),   x^ = min + scale * code

Scale and minimum of every group are float16, as the cache holds them. Values of a group: neighbouring channels of one
token (KIVI's values, most engines), or one channel of neighbouring tokens (KIVI's keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.moving import moved

Axis = Literal["token", "channel"]


@dataclass(frozen=True)
class GroupedMinMax:
    """A codec of one site. bits [C]: widths, equal inside a group of channels; 0 reads back as zero.

    axis "token": groups of ``group`` channels of a token. axis "channel": every channel over ``group`` consecutive
    tokens, counted from the first token given. clip: share of the range between minimum and maximum that is covered.
    Source: KIVI, "A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2402.02750); clipping: OSCAR (2605.17757).
    """

    bits: Tensor
    group: int
    axis: Axis = "token"
    clip: float = 1.0

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., T, C] as the cache returns them, in the dtype of ``x``.

        With axis "channel" the tokens behind the last whole group are returned as they are: a cache packs whole groups.
        """
        if self.axis == "token":
            rows = torch.unflatten(self._wide(x), -1, (-1, self.group))
            width = torch.unflatten(self.bits, 0, (-1, self.group))[:, :1]
            return saturated(self._coded(rows, width, -1).flatten(-2), x.dtype)
        whole = x.shape[-2] // self.group * self.group
        blocks = torch.unflatten(self._wide(x[..., :whole, :]), -2, (whole // self.group, self.group))
        coded = saturated(self._coded(blocks, self.bits, -2).flatten(-3, -2), x.dtype)
        return torch.cat((coded, x[..., whole:, :]), -2)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> GroupedMinMax:
        """Move to a device."""
        return GroupedMinMax(moved(self.bits, device), self.group, self.axis, self.clip)

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def _coded(self, values: Tensor, width: Tensor, dim: int) -> Tensor:
        if values.numel() == 0:
            return values
        low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
        middle, half = (high + low) / 2, (high - low) / 2 * self.clip
        steps = torch.exp2(width.to(values.dtype)) - 1
        base = saturated(middle - half, torch.float16).to(values.dtype)
        scale = saturated(2 * half / steps.clamp_min(1), torch.float16).to(values.dtype)
        # a group without spread has scale zero and is its minimum
        codes = torch.round((values - base) / torch.where(scale > 0, scale, torch.ones_like(scale)))
        coded = base + scale * torch.minimum(codes.clamp_min(0), steps)
        return torch.where(width > 0, coded, torch.zeros_like(coded))


def head_errors(latents: Tensor, heads: int, widest: int) -> Tensor:
    """Mean squared error of every head's channels at widths 0 .. ``widest``, per token: [R, C] -> [H, widest + 1]."""
    size = latents.shape[-1] // heads
    found = [latents.square()]
    for bits in range(1, widest + 1):
        codec = GroupedMinMax(torch.full((latents.shape[-1],), bits, device=latents.device), size)
        found.append((codec.reconstruct(latents) - latents).square())
    return torch.stack([torch.unflatten(error.mean(0), 0, (heads, size)).mean(-1) for error in found], -1)
