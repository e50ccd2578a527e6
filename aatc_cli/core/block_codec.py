"""Codec of blocks of one precision: one float16 scale for a block, the largest magnitude in it.

    step = 2 scale / 2^b,   code = clamp(floor(h / step), -2^(b-1), 2^(b-1) - 1),   h^ = (code + 1/2) step

Source: KVTC (2511.01815), without its entropy stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.precision_blocks import GRID, SIZES, WIDTHS, Block


@dataclass(frozen=True)
class BlockCodec:
    """A codec of latents [..., n]; those in no block read back as zero."""

    blocks: tuple[Block, ...]

    def reconstruct(self, h: Tensor) -> Tensor:
        """The latents as the cache returns them."""
        out = torch.zeros_like(h)
        for block in self.blocks:
            span = slice(block.start, block.start + block.size)
            out[..., span] = coded_block(h[..., span], block.bits)
        return out

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> BlockCodec:
        """Nothing to move."""
        return self


def coded_block(h: Tensor, bits: int) -> Tensor:
    """One block [..., n] of latents after quantization with its own scale."""
    peak = saturated(h.abs().amax(-1, keepdim=True), torch.float16).to(h.dtype)
    step = peak * 2.0 ** (1 - bits)
    codes = torch.floor(h / torch.where(step > 0, step, torch.ones_like(step)))
    half = 2.0 ** (bits - 1)
    return torch.where(step > 0, (codes.clamp(-half, half - 1) + 0.5) * step, torch.zeros_like(h))


def block_errors(latents: Tensor) -> Tensor:
    """Summed squared error per token of every possible block. latents [R, n] -> [n / 16, sizes, widths] float64.

    Starts are multiples of 16; infinite where a block would not fit. n is a multiple of 16. Codes are made in float32,
    as a cache makes them.
    """
    latents = latents.to(torch.float32)
    count = latents.shape[1] // GRID
    errors = torch.full((count, len(SIZES), len(WIDTHS)), torch.inf, dtype=torch.float64)
    for place, size in enumerate(SIZES):
        fitting = count - size // GRID + 1
        for start in range(max(fitting, 0)):
            block = latents[:, start * GRID : start * GRID + size]
            for index, bits in enumerate(WIDTHS):
                error = (coded_block(block, bits) - block).square().sum(-1).mean(dtype=torch.float64)
                errors[start, place, index] = error
    return errors
