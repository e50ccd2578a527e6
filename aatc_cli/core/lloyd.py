"""Quantization of unit-normal latents, with a token scale that is searched instead of read off the maximum.

    z = h / (alpha sigma_c),   code = nearest level of the b-bit quantizer of a unit normal,   h^ = alpha sigma_c level.

Up to `LLOYD_BITS` bits the levels are those of Max and Lloyd (every level the mean of its cell, every threshold midway
between levels); wider codes are mid-rise uniform with the step that is best for a unit normal. The quantizer "uniform"
has such steps at every width: a little more error, and levels that need no table. alpha is one of
`CANDIDATES` times the root mean square of h / sigma over the group's coded channels, the one with the least weighted
squared error, as float16 or one byte holds it; decoding costs the same as with any other scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri
from torch import Tensor

from aatc_cli.core.curves import DISTORTION, DISTORTION_UNIFORM
from aatc_cli.core.scales import rounded_scale

LLOYD_BITS = 7
CANDIDATES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)

Floats = NDArray[np.float64]


@lru_cache
def levels(bits: int) -> Tensor:
    """The 2^bits reconstruction levels for a unit normal, rising, float64; [0] at zero bits."""
    if bits == 0:
        return torch.zeros(1, dtype=torch.float64)
    count = 2**bits
    if bits > LLOYD_BITS:
        return torch.from_numpy((np.arange(count) - (count - 1) / 2) * uniform_step(bits))
    # the optimal density of levels is that of a normal three times as wide: a start close to the fixed point
    points = np.sqrt(3.0) * ndtri((np.arange(count) + 0.5) / count)
    for _ in range(20_000):
        moved = _cell_means(points)
        if np.abs(moved - points).max() < 1e-10:
            break
        points = moved
    return torch.from_numpy((points - points[::-1]) / 2)


@lru_cache
def uniform_step(bits: int) -> float:
    """Spacing of the 2^bits evenly spaced, symmetric levels with the least error on a unit normal; 0 at zero bits."""
    if bits == 0:
        return 0.0
    count = 2**bits
    half = np.arange(count) - (count - 1) / 2
    found = minimize_scalar(
        lambda step: unit_distortion(half * step),
        bounds=(2.0 / count, 16.0 / count),
        method="bounded",
        options={"xatol": 1e-9 / count},
    )
    return float(found.x)


@dataclass(frozen=True)
class Tables:
    """Levels and thresholds of every channel at its own width, so that all channels quantize at once.

    thresholds [C, n - 1] (padded by infinity) and points [C, n] serve widths with Lloyd-Max levels, n = 2^(widest of
    them); step [C] serves those with uniform ones and is zero elsewhere; half [C] is 2^(b-1).
    """

    bits: Tensor
    thresholds: Tensor
    points: Tensor
    step: Tensor
    half: Tensor

    @classmethod
    def of(cls, bits: Tensor, like: Tensor, uniform: bool = False) -> Tables:
        """Tables for widths ``bits`` [C] on the device and in the dtype of ``like``.

        uniform: evenly spaced levels at every width.
        """
        widths: list[int] = bits.tolist()
        tabled = 0 if uniform else LLOYD_BITS
        count = 2 ** max((width for width in widths if width <= tabled), default=0)
        thresholds = torch.full((len(widths), count - 1), torch.inf, dtype=torch.float64)
        points = torch.zeros(len(widths), count, dtype=torch.float64)
        step = torch.zeros(len(widths), dtype=torch.float64)
        for channel, width in enumerate(widths):
            if width > tabled:
                step[channel] = uniform_step(width)
            elif width:
                found = levels(width)
                thresholds[channel, : found.numel() - 1] = (found[1:] + found[:-1]) / 2
                points[channel, : found.numel()] = found
        half = torch.where(bits > 0, torch.exp2(bits.to(torch.float64) - 1), 0.0)
        return cls(bits, thresholds.to(like), points.to(like), step.to(like), half.to(like))

    def nearest(self, z: Tensor) -> Tensor:
        """Indices 0 .. 2^b - 1 of the levels nearest to ``z`` [N, C]; zero at zero bits. -> [N, C] in z's dtype."""
        narrow = torch.searchsorted(self.thresholds, z.T.contiguous()).T.to(z.dtype)
        safe = torch.where(self.step > 0, self.step, torch.ones_like(self.step))
        wide = torch.minimum((torch.floor(z / safe) + self.half).clamp_min(0), 2 * self.half - 1)
        return torch.where(self.step > 0, wide, torch.where(self.bits > 0, narrow, torch.zeros_like(narrow)))

    def values(self, index: Tensor) -> Tensor:
        """Levels of the indices [N, C]; zero at zero bits."""
        inside = index.clamp_max(self.points.shape[1] - 1).to(torch.int64)
        narrow = self.points.gather(1, inside.T).T
        return torch.where(self.step > 0, (index - self.half + 0.5) * self.step, narrow)


def quantize(
    h: Tensor, sigma: Tensor, tables: Tables, weight: Tensor, groups: int, scale_bits: int = 16
) -> tuple[Tensor, Tensor]:
    """Codes [..., C] int32 in -2^(b-1) .. 2^(b-1) - 1 and token scales [..., groups] float16 of latents h [..., C].

    The scales are those that a cache with scales of ``scale_bits`` bits holds (`core.scales`).
    sigma, weight [C]: standard deviation and importance of every channel. Zero where a channel has no bits.
    """
    coded = tables.bits > 0
    rows = h.reshape(-1, h.shape[-1])
    unit = torch.where(coded, rows / torch.where(sigma > 0, sigma, torch.ones_like(sigma)), torch.zeros_like(rows))
    unit = unit.clamp(torch.finfo(unit.dtype).min, torch.finfo(unit.dtype).max)
    # squares are of shares of the group's loudest channel: those of the latents themselves may overflow
    loudest = torch.unflatten(unit.abs(), -1, (groups, -1)).amax(-1).clamp_min(torch.finfo(unit.dtype).tiny)
    peak = _by_channel(loudest, unit)
    counts = torch.unflatten(coded, -1, (groups, -1)).sum(-1).clamp_min(1)
    rms = loudest * (torch.unflatten((unit / peak).square(), -1, (groups, -1)).sum(-1) / counts).sqrt()
    price = torch.where(coded, weight * sigma.square(), torch.zeros_like(sigma))
    best = torch.full_like(rms, torch.inf)
    best_alpha = torch.zeros_like(rms, dtype=torch.float16)
    for factor in CANDIDATES:
        alpha = rounded_scale(rms * factor, scale_bits)
        scale = _by_channel(alpha, unit)
        nearest = tables.values(tables.nearest(_divided(unit, scale))) * scale
        error = ((unit - nearest) / peak).square() * price
        total = torch.unflatten(error, -1, (groups, -1)).sum(-1)
        best_alpha = torch.where(total < best, alpha, best_alpha)
        best = torch.minimum(total, best)
    index = tables.nearest(_divided(unit, _by_channel(best_alpha, unit)))
    codes = torch.where(coded, index - tables.half, torch.zeros_like(index)).to(torch.int32)
    return codes.reshape(h.shape), best_alpha.reshape(*h.shape[:-1], groups)


def dequantize(codes: Tensor, alpha: Tensor, sigma: Tensor, tables: Tables) -> Tensor:
    """Latents of ``codes`` [..., C]: alpha sigma level."""
    index = codes.reshape(-1, codes.shape[-1]).to(sigma.dtype) + tables.half
    values = torch.where(tables.bits > 0, tables.values(index), torch.zeros_like(index)).reshape(codes.shape)
    return values * _by_channel(alpha, sigma) * sigma


def noise_variance(alpha: Tensor, sigma: Tensor, bits: Tensor, uniform: bool = False) -> Tensor:
    """White-noise model of E[(dh)^2]: alpha^2 sigma^2 times the quantizer's error on a unit normal. -> [..., C]."""
    table = torch.tensor(DISTORTION_UNIFORM if uniform else DISTORTION, dtype=sigma.dtype, device=sigma.device)
    spread = torch.where(bits > 0, _by_channel(alpha, sigma).square(), torch.ones_like(sigma))
    return spread * sigma.square() * table[bits.to(torch.int64)]


def _by_channel(alpha: Tensor, like: Tensor) -> Tensor:
    size = like.shape[-1] // alpha.shape[-1]
    return alpha.to(like.dtype).repeat_interleave(size, -1)


def _divided(unit: Tensor, scale: Tensor) -> Tensor:
    return unit / torch.where(scale > 0, scale, torch.ones_like(scale))


def _density(x: Floats) -> Floats:
    values: Floats = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return values


def _cell_means(points: Floats) -> Floats:
    edges = np.concatenate(([-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]))
    mass = np.diff(ndtr(edges))
    means: Floats = (_density(edges[:-1]) - _density(edges[1:])) / mass
    return means


def unit_distortion(points: Floats) -> float:
    """Mean squared error on a unit normal of a quantizer with these levels and midway thresholds; closed form."""
    edges = np.concatenate(([-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]))
    mass, density = np.diff(ndtr(edges)), _density(edges)
    first = density[:-1] - density[1:]
    finite = np.where(np.isfinite(edges), edges, 0.0) * density
    second = mass + finite[:-1] - finite[1:]
    return float(np.sum(second - 2 * points * first + points**2 * mass))
