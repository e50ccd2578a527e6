"""Levels of quantizers for a unit normal: those of Max and Lloyd, even ones, and the error that levels make.

Up to `LLOYD_BITS` bits the levels are those of Max (1960) and Lloyd (1982): every level the mean of its cell, every
threshold midway between levels. Wider codes are mid-rise uniform with the step that is best for a unit normal.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri
from torch import Tensor

LLOYD_BITS = 7
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
