"""Evenly spaced cells with a wide middle one, for codes of variable length: steps, cells, levels and probabilities.

A latent z of unit variance is coded at resolution w = 1, 2, ... 16 by its cell: the step is s = 4 2^(-(w-1)/2), the
cell of 0 reaches to 0.6 s on both sides and cell j lies from (j - 0.4) s to (j + 0.6) s. What is coded is j with its
sign; how many bits it takes depends on how likely it is, so a channel may take a quarter of a bit, and a loud token
takes more bits instead of more error. From w = 10 on the lowest bits of j, which are nearly even, are kept as they are.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from aatc_cli.core.curves import restoring_gain

Floats = NDArray[np.float64]

WIDEST = 16
DEAD = 0.6
# of levels in the outer cells: tails are longer than a normal's, whose centroids hug the inner edge
_LEAST = 0.2
# largest magnitude of a symbol; what lies further out is written beside the stream, in so many bits
MOST = 63
SYMBOLS = 2 * MOST + 2
OUTSIDE = SYMBOLS - 1
OUTSIDE_BITS = 8
# scales of the probability models, a fourth root of 2 apart, and the spread of scales inside each
MODELS = 16
_SPREAD = ((0.6, 0.3), (1.0, 0.45), (1.55, 0.25))
# probabilities are whole shares of this
TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
# the same for all latents at once is counted twice, as of restored levels
RESTORED = 0.5

# mean squared error and bits on a unit normal by resolution; constants, so that plans do not depend on libraries
ERROR = (
    1.0,
    0.881235546284,
    0.603654666342,
    0.340234150048,
    0.180977548686,
    0.0922230052324,
    0.0457882154765,
    0.0225266825847,
    0.0110715007532,
    0.0054532120853,
    0.00269394571755,
    0.00133459862558,
    0.000662725974243,
    0.000329698051737,
    0.000164248669432,
    8.19092013018e-05,
    4.0877830176e-05,
)
BITS = (
    0.0,
    0.137085713771,
    0.525199170091,
    1.02052575191,
    1.49595598867,
    1.9855226603,
    2.49000611372,
    2.99992281159,
    3.51037904812,
    4.01947931708,
    4.52675303607,
    5.03230862458,
    5.53644017639,
    6.03946203836,
    6.54164858675,
    7.04321943378,
    7.54434249396,
)


def step(width: int) -> float:
    """Distance of cells at a resolution, for a latent of unit variance."""
    return float(4.0 * 2.0 ** (-(width - 1) / 2))


def plain_bits(width: int) -> int:
    """Lowest bits of j that are kept as they are."""
    return max(0, (width - 8) // 2)


def most(width: int) -> int:
    """Largest magnitude of a code."""
    return (128 << plain_bits(width)) - 1


@lru_cache
def levels(width: int) -> Floats:
    """What magnitudes 0 .. most are read as, with the gain of restored levels: [most + 1]."""
    if not width:
        return np.zeros(1)
    found = _centroids(width)
    gain = restoring_gain(ERROR[width], RESTORED)
    return found * gain


def _centroids(width: int) -> Floats:
    j = np.arange(1, most(width) + 1)
    low, high = (j - 1 + DEAD) * step(width), (j + DEAD) * step(width)
    mass = ndtr(-low) - ndtr(-high)
    inside = (np.exp(-low * low / 2) - np.exp(-high * high / 2)) / np.sqrt(2 * np.pi)
    centre = np.where(mass > 1e-280, inside / np.maximum(mass, 1e-300), low)
    return np.concatenate([[0.0], np.maximum(centre, low + _LEAST * (high - low))])


@lru_cache
def likelihoods(width: int, model: int) -> NDArray[np.int64]:
    """Shares of `TOTAL` of the symbols (j >> plain bits) + MOST, and of `OUTSIDE`: [SYMBOLS]; the last is at least 1.

    A symbol with a share of 0 is written as one that lies outside, as are those beyond MOST.
    """
    shift = plain_bits(width)
    edges = np.arange(-MOST, MOST + 2, dtype=np.float64) * (1 << shift)
    # symbol i holds j from edges[i] to edges[i + 1] - 1; below zero cells are mirrored
    lower = np.where(edges > 0, edges - 1 + DEAD, edges - DEAD) * step(width)
    scale = 2.0 ** ((model - MODELS // 2) / 4)
    mass = np.zeros(SYMBOLS - 1)
    for spread, share in _SPREAD:
        mass += share * np.diff(ndtr(lower / (scale * spread)))
    counts = np.zeros(SYMBOLS, dtype=np.int64)
    counts[:-1] = np.rint(mass * TOTAL).astype(np.int64)
    counts[OUTSIDE] = 1
    counts[int(counts.argmax())] += TOTAL - int(counts.sum())
    return counts


@lru_cache
def code_lengths(width: int) -> NDArray[np.float64]:
    """Bits of every symbol under every model, with those that are written beside it: [SYMBOLS, MODELS]."""
    shares = np.stack([likelihoods(width, model) for model in range(MODELS)], 1)
    outside = np.log2(TOTAL / shares[OUTSIDE]) + OUTSIDE_BITS
    found: NDArray[np.float64] = np.where(shares > 0, np.log2(TOTAL / np.maximum(shares, 1)), outside)
    found[OUTSIDE] = outside
    return found + plain_bits(width)


def normal_error(width: int) -> float:
    """Mean squared error of the cells' levels, without gain, on a unit normal."""
    if not width:
        return 1.0
    points = _centroids(width)
    j = np.arange(1, points.size)
    low, high = (j - 1 + DEAD) * step(width), (j + DEAD) * step(width)
    high[-1] = np.inf
    density = [np.exp(-np.minimum(x * x, 1e4) / 2) / np.sqrt(2 * np.pi) for x in (low, high)]
    mass = ndtr(-low) - ndtr(-high)
    first = density[0] - density[1]
    second = mass + low * density[0] - np.where(np.isfinite(high), high, 0.0) * density[1]
    outside = np.sum(second - 2 * points[1:] * first + points[1:] ** 2 * mass)
    edge = DEAD * step(width)
    middle = (2 * ndtr(edge) - 1) - 2 * edge * np.exp(-edge * edge / 2) / np.sqrt(2 * np.pi)
    return float(2 * outside + middle)


def normal_bits(width: int) -> float:
    """Entropy of the cells on a unit normal."""
    if not width:
        return 0.0
    j = np.arange(1, most(width) + 1)
    mass = ndtr(-(j - 1 + DEAD) * step(width)) - ndtr(-(j + DEAD) * step(width))
    middle = 2 * ndtr(DEAD * step(width)) - 1
    parts = np.concatenate([mass[mass > 1e-300], mass[mass > 1e-300], [middle]])
    return float(-(parts * np.log2(parts)).sum())
