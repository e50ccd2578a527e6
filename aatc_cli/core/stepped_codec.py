"""The codec of latents in evenly spaced cells, whose codes have no fixed size and no token scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.stepped_tables import DEAD, levels, most, step


@dataclass(frozen=True)
class SteppedCodec(TransformCodec):
    """``bits`` are resolutions (`core.stepped_tables`): codes are cells j with their sign, 0 where there is none."""

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Step and largest magnitude of every channel, [C]."""
        widths = self.bits.tolist()
        steps = torch.tensor([step(width) if width else 0.0 for width in widths], dtype=torch.float64)
        largest = torch.tensor([float(most(width)) if width else 0.0 for width in widths], dtype=torch.float64)
        return steps.to(self.variance) * self.variance.sqrt(), largest.to(self.variance)

    @cached_property
    def _levels(self) -> tuple[Tensor, Tensor]:
        """Levels of all resolutions in use one after another, and where those of a channel begin."""
        widths: list[int] = self.bits.tolist()
        starts, parts, at = {}, [], 0
        for width in sorted(set(widths)):
            starts[width], part = at, torch.from_numpy(levels(width))
            parts.append(part)
            at += part.numel()
        first = torch.tensor([starts[width] for width in widths], device=self.variance.device)
        return torch.cat(parts).to(self.variance), first

    def quantize(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., C] int32 of latents ``h`` [..., C], and token scales that say nothing."""
        steps, largest = self._sizes
        z = h / torch.where(steps > 0, steps, torch.ones_like(steps))
        size = torch.floor(z.abs() + (1.0 - DEAD)).clamp_(max=torch.finfo(z.dtype).max).minimum(largest)
        scales = torch.zeros(*h.shape[:-1], self.groups, dtype=torch.float16, device=h.device)
        return (size * z.sign()).to(torch.int32), scales

    def dequantize(self, codes: Tensor, alpha: Tensor) -> Tensor:
        """Latents [..., C] of codes."""
        table, first = self._levels
        size = table[codes.abs().to(torch.int64) + first]
        return size * codes.sign() * self.variance.sqrt()
