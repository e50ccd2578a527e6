"""Codes of one head group of one side in even cells: no token scales, cells of every class of their own width."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.stepped_codec import SteppedCodec
from aatc_cli.core.stepped_tables import DEAD, levels, most, step
from aatc_cli.core.tile_codec import TileCodec

# loudness is told in so many steps of a factor of 2
LOUDNESS_STEPS = 64


def loudness_size(index: Tensor, dtype: torch.dtype) -> Tensor:
    """How many times as large as planned cells are."""
    return torch.exp2(index.to(dtype) / LOUDNESS_STEPS)


class CellCode:
    """Cells of one head group: ``group`` of ``site``. encode, decode [E, E]: its transform; bits [n, E]: resolutions.

    A latent h of a token of class k whose loudness is g lies in cell j of step g size[k].
    """

    def __init__(self, site: TileCodec, group: int) -> None:
        codec, self.rule = site.codec, site.rule
        assert isinstance(codec, SteppedCodec)
        size = int(codec.encode.shape[1])
        span = slice(group * size, (group + 1) * size)
        self.encode, self.decode = codec.encode[group], codec.decode[group]
        self.bits = site.bits[:, span].to(torch.int64)
        self.sigma = codec.variance[span].sqrt()
        widths = self.bits.tolist()
        self.coded = any(any(row) for row in widths)
        steps = [[step(width) if width else torch.inf for width in row] for row in widths]
        self.sizes = torch.tensor(steps).to(self.encode) * self.sigma
        self.largest = torch.tensor([[float(most(width)) if width else 0.0 for width in row] for row in widths]).to(
            self.encode
        )
        starts, parts, at = {0: 0}, [torch.zeros(1, dtype=torch.float64)], 1
        for width in sorted({width for row in widths for width in row} - {0}):
            starts[width], part = at, torch.from_numpy(levels(width))
            parts.append(part)
            at += part.numel()
        self.levels = torch.cat(parts).to(self.encode)
        self.first = torch.tensor([[starts[width] for width in row] for row in widths], device=self.encode.device)

    def quantize(self, latents: Tensor, classes: Tensor, loudness: Tensor) -> Tensor:
        """Cells [..., T, E] int32 of latents; classes [..., T]; loudness [..., T] of every token."""
        z = latents / (self.sizes[classes] * loudness[..., None])
        size = torch.floor(z.abs() + (1.0 - DEAD)).clamp_(max=torch.finfo(z.dtype).max).minimum(self.largest[classes])
        return (size * z.sign()).to(torch.int32)

    def dequantize(self, cells: Tensor, classes: Tensor, loudness: Tensor) -> Tensor:
        """Latents [..., T, E] of cells."""
        size = self.levels[self.first[classes] + cells.abs()]
        return size * cells.sign() * (self.sigma * loudness[..., None])
