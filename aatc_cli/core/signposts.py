"""Non-uniform quantization by signposts, with the largest values of a token kept exact beside them.

Values are brought to -1 .. 1 by a range, per channel (calibrated) or per token (its own), and take the nearest of 2^b
points that k-means placed with the squared loss gradient as weight. Source: KVQuant (2401.18079), "nuqX" with dense and
sparse parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.overheads import outlier_count

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SignpostCodec:
    """A codec of one site. points [2^b], rising, in -1 .. 1; the share ``outliers`` of the values stays exact, float16.

    low, high [C] are the range of every channel; the values of ``block`` consecutive tokens that lie furthest out in
    their ranges stay exact. Without them a token's range is that of its own values between its outermost ones (half of
    them at either end), which stay exact, held as a float16 centre and half-width.
    """

    points: Tensor
    outliers: float
    low: Tensor | None = None
    high: Tensor | None = None
    block: int = 1

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., T, C] as the cache returns them, in the dtype of ``x``.

        With channel ranges the tokens behind the last whole block are returned as they are: a cache packs whole blocks.
        """
        if self.low is None:
            return self._coded(x)
        whole = x.shape[-2] // self.block * self.block
        return torch.cat((self._coded(x[..., :whole, :]), x[..., whole:, :]), -2)

    def _coded(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centre, half, exact = self.ranges(wide)
        unit = normalized(wide, centre, half)
        points = self.points.to(unit)
        nearest = points[torch.searchsorted((points[1:] + points[:-1]) / 2, unit.contiguous())]
        kept = saturated(wide, torch.float16).to(wide.dtype)
        return saturated(torch.where(exact, kept, centre + half * nearest), x.dtype)

    def ranges(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centre and half-width that every value is measured by, and which values of ``x`` [..., T, C] stay exact."""
        if self.low is None or self.high is None:
            return token_ranges(x, outlier_count(self.outliers, int(x.shape[-1])))
        low, high = self.low.to(x), self.high.to(x)
        centre, half = (high + low) / 2, (high - low) / 2
        size = torch.unflatten(normalized(x, centre, half).abs(), -2, (-1, self.block)).flatten(-2)
        exact = outermost(size, outlier_count(self.outliers, int(size.shape[-1])))
        return centre.expand_as(x), half.expand_as(x), exact.reshape(x.shape)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> SignpostCodec:
        """Move to a device, tables in ``dtype``."""
        low = None if self.low is None else self.low.to(device, dtype)
        high = None if self.high is None else self.high.to(device, dtype)
        return SignpostCodec(self.points.to(device, dtype), self.outliers, low, high, self.block)


def outermost(size: Tensor, count: int) -> Tensor:
    """Which of the values [..., n] are among the ``count`` largest of their row."""
    chosen = size.topk(count, -1).indices if count else size.new_empty((*size.shape[:-1], 0), dtype=torch.int64)
    return torch.zeros_like(size, dtype=torch.bool).scatter_(-1, chosen, True)


def token_ranges(x: Tensor, outliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centre and half-width (float16 numbers) of every token's values but its outermost ones, and which those are."""
    lower = outliers // 2
    exact = outermost(x, outliers - lower) | outermost(-x, lower)
    low = x.masked_fill(exact, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(exact, -torch.inf).amax(-1, keepdim=True)
    centre, half = (saturated(v, torch.float16).to(x.dtype) for v in ((high + low) / 2, (high - low) / 2))
    return centre.expand_as(x), half.expand_as(x), exact


def normalized(x: Tensor, centre: Tensor, half: Tensor) -> Tensor:
    """``x`` in its range: -1 at the lower end, 1 at the upper one, never beyond by more than the largest float."""
    return (x - centre) / torch.where(half > 0, half, torch.ones_like(half))


def place_signposts(values: Floats, weights: Floats, bits: int, rounds: int = 200) -> Floats:
    """2^bits points, rising, by weighted k-means in one dimension: Lloyd's rounds from the weights' quantiles.

    values, weights [n]: weights not negative. A point whose cell holds no weight stays where it was. Deterministic:
    float64, sorted, cumulated once.
    """
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    mass = np.concatenate(([0.0], np.cumsum(weights)))
    first = np.concatenate(([0.0], np.cumsum(weights * values)))
    if values.size == 0 or mass[-1] <= 0:
        return np.linspace(-1.0, 1.0, 2**bits)
    wanted = (np.arange(2**bits) + 0.5) / 2**bits * mass[-1]
    points = values[np.minimum(np.searchsorted(mass[1:], wanted), values.size - 1)]
    for _ in range(rounds):
        edges = np.concatenate(([0], np.searchsorted(values, (points[1:] + points[:-1]) / 2), [values.size]))
        inside = np.diff(mass[edges])
        moved = np.where(inside > 0, np.diff(first[edges]) / np.where(inside > 0, inside, 1.0), points)
        if np.array_equal(moved, points):
            break
        points = moved
    result: Floats = np.sort(points)
    return result
