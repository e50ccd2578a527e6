"""Lloyd-Max quantization of unit-normal latents, with a token scale that is searched instead of read off the maximum.

    z = h / (alpha sigma_c),   code = nearest level of the b-bit quantizer of a unit normal,   h^ = alpha sigma_c level.

Up to `LLOYD_BITS` bits the levels are those of Max and Lloyd (every level the mean of its cell, every threshold midway
between levels); wider codes are mid-rise uniform with the step that is best for a unit normal. alpha is one of
`CANDIDATES` times the root mean square of h / sigma over the group's coded channels, the one with the least weighted
squared error; it is held in float16, and decoding costs the same as with any other scale.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri
from torch import Tensor

from aatc_cli.config import MAX_BITS

LLOYD_BITS = 7
CANDIDATES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)

# mean squared error on a unit normal at 0..16 bits; constants, so that plans do not depend on a machine's libraries
DISTORTION = (
    1.0, 0.363380227632, 0.117481847829, 0.0345477607885, 0.00950100800819, 0.00250466835567, 0.000644239665317,
    0.00016347822998, 8.76861857838e-05, 2.49190296459e-05, 6.99700519683e-06, 1.94441312857e-06, 5.35536536531e-07,
    1.46369327797e-07, 3.97393959667e-08, 1.07269830699e-08, 2.88092145932e-09,
)  # fmt: skip

Floats = NDArray[np.float64]


@lru_cache
def levels(bits: int) -> Tensor:
    """The 2^bits reconstruction levels for a unit normal, rising, float64; [0] at zero bits."""
    if bits == 0:
        return torch.zeros(1, dtype=torch.float64)
    count = 2**bits
    if bits > LLOYD_BITS:
        step = _uniform_step(count)
        return torch.from_numpy((np.arange(count) - (count - 1) / 2) * step)
    # the optimal density of levels is that of a normal three times as wide: a start close to the fixed point
    points = np.sqrt(3.0) * ndtri((np.arange(count) + 0.5) / count)
    for _ in range(20_000):
        moved = _cell_means(points)
        if np.abs(moved - points).max() < 1e-10:
            break
        points = moved
    return torch.from_numpy((points - points[::-1]) / 2)


def quantize(h: Tensor, sigma: Tensor, bits: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Codes [..., C] int32 in -2^(b-1) .. 2^(b-1) - 1 and token scales [..., groups] float16 of latents h [..., C].

    sigma, weight [C]: standard deviation and importance of every channel; bits [C]. Zero where a channel has no bits.
    """
    coded = bits > 0
    unit = torch.where(coded, h / torch.where(sigma > 0, sigma, torch.ones_like(sigma)), torch.zeros_like(h))
    energy = unit.square().unflatten(-1, (groups, -1)).sum(-1)  # type: ignore[no-untyped-call]
    counts = torch.unflatten(coded, -1, (groups, -1)).sum(-1).clamp_min(1)
    rms = (energy / counts).sqrt()
    price = torch.where(coded, weight * sigma.square(), torch.zeros_like(sigma))
    best_error: Tensor | None = None
    for factor in CANDIDATES:
        alpha = (rms * factor).clamp_max(torch.finfo(torch.float16).max).to(torch.float16)
        codes = _nearest(unit, alpha, bits)
        error = (unit - _unit_values(codes, alpha, bits, unit.dtype)).square() * price
        total = torch.unflatten(error, -1, (groups, -1)).sum(-1)
        if best_error is None:
            best_error, best_alpha = total, alpha
        else:
            better = total < best_error
            best_error = torch.where(better, total, best_error)
            best_alpha = torch.where(better, alpha, best_alpha)
    return _nearest(unit, best_alpha, bits), best_alpha


def dequantize(codes: Tensor, alpha: Tensor, sigma: Tensor, bits: Tensor) -> Tensor:
    """Latents of ``codes`` [..., C]: alpha sigma level."""
    return _unit_values(codes, alpha, bits, sigma.dtype) * sigma


def noise_variance(alpha: Tensor, sigma: Tensor, bits: Tensor) -> Tensor:
    """White-noise model of E[(dh)^2]: alpha^2 sigma^2 times the quantizer's error on a unit normal. -> [..., C]."""
    table = torch.tensor(DISTORTION, dtype=sigma.dtype, device=sigma.device)
    spread = torch.where(bits > 0, _by_channel(alpha, sigma).square(), torch.ones_like(sigma))
    return spread * sigma.square() * table[bits.to(torch.int64)]


def _by_channel(alpha: Tensor, like: Tensor) -> Tensor:
    size = like.shape[-1] // alpha.shape[-1]
    return alpha.to(like.dtype).repeat_interleave(size, -1)


def _nearest(unit: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    scale = _by_channel(alpha, unit)
    z = unit / torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.zeros_like(unit, dtype=torch.int32)
    for width in _widths(bits):
        columns = bits == width
        points = levels(width).to(unit.device, unit.dtype)
        thresholds = (points[1:] + points[:-1]) / 2
        codes[..., columns] = torch.bucketize(z[..., columns].contiguous(), thresholds, out_int32=True) - 2 ** (
            width - 1
        )
    return codes


def _unit_values(codes: Tensor, alpha: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.zeros(codes.shape, dtype=dtype, device=codes.device)
    for width in _widths(bits):
        columns = bits == width
        points = levels(width).to(codes.device, values.dtype)
        values[..., columns] = points[(codes[..., columns] + 2 ** (width - 1)).to(torch.int64)]
    return values * _by_channel(alpha, values)


def _widths(bits: Tensor) -> list[int]:
    found: list[int] = torch.unique(bits).tolist()
    return [width for width in found if width > 0]


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


def _uniform_step(count: int) -> float:
    half = np.arange(count) - (count - 1) / 2
    found = minimize_scalar(
        lambda step: unit_distortion(half * step), bounds=(2.0 / count, 16.0 / count), method="bounded",
        options={"xatol": 1e-9 / count},
    )  # fmt: skip
    return float(found.x)


assert len(DISTORTION) == MAX_BITS + 1
