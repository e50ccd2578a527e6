"""Rate groups: channels of a head that share a width, coded as a norm and a point near the sphere (Block-GTQ).

A group of m channels is a vector: its norm is kept, its direction turned by a fixed orthogonal matrix and every
coordinate rounded to the nearest of 2^b levels, those of least error for a coordinate of a random point on the sphere,

    density (1 - x^2)^((m - 3) / 2) on -1 .. 1.

Source: TurboQuant's first stage (2504.19874), by groups of one rate: Block-GTQ (2606.24033).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.signposts import place_signposts

# points of the sphere's angle at which the density is taken
_ANGLES = 16384


@dataclass(frozen=True)
class RateGroups:
    """A codec of one site. bits [C]: widths, of which the equal ones of a head are a group; 0 reads back as zero."""

    bits: Tensor
    dim: int

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        found = torch.zeros_like(wide)
        for width, places in self._groups():
            found[..., places] = coded_direction(wide[..., places], width)
        return saturated(found, x.dtype)

    def _groups(self) -> list[tuple[int, Tensor]]:
        """Width and channels of every group of every head."""
        bits = self.bits.cpu()
        heads = torch.arange(bits.numel()) // self.dim
        return [
            (width, torch.nonzero((heads == head) & (bits == width))[:, 0])
            for head in range(bits.numel() // self.dim)
            for width in sorted(set(bits[heads == head].tolist()) - {0})
        ]

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> RateGroups:
        """Nothing to move: widths are read on the host."""
        return self


def coded_direction(x: Tensor, bits: int) -> Tensor:
    """Vectors [..., m] as a float16 norm and a direction at ``bits`` a coordinate give them back."""
    size = int(x.shape[-1])
    held = saturated(x.norm(dim=-1, keepdim=True), torch.float16).to(x.dtype)
    turn = rotation_of(size).to(x)
    unit = (x / torch.where(held > 0, held, torch.ones_like(held))) @ turn.mT
    points = torch.from_numpy(sphere_levels(size, bits)).to(x)
    nearest = points[torch.searchsorted((points[1:] + points[:-1]) / 2, unit.contiguous())]
    return (nearest @ turn) * held


@lru_cache(maxsize=64)
def rotation_of(size: int) -> Tensor:
    """A random orthogonal matrix [size, size] in float64, a function of its size alone."""
    generator = torch.Generator().manual_seed(size)
    found, upper = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    turn: Tensor = found * torch.sign(upper.diagonal())
    return turn


@lru_cache(maxsize=256)
def sphere_levels(size: int, bits: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """2^bits levels, rising, of least squared error for a coordinate of a random point on the sphere in ``size`` dims.

    In one dimension the sphere is its two ends.
    """
    if size == 1:
        return np.repeat([-1.0, 1.0], 2 ** (bits - 1))
    angles = (np.arange(_ANGLES) + 0.5) * np.pi / _ANGLES
    found = place_signposts(np.cos(angles), np.sin(angles) ** (size - 2), bits)
    return (found - found[::-1]) / 2
