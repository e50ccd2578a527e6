"""Quantization of unit-normal latents, with a token scale that is searched instead of read off the maximum.

    z = h / (alpha sigma_c),   code = nearest level of the b-bit quantizer of a unit normal,   h^ = alpha sigma_c level.

Levels are those of `core.lloyd_levels`. The quantizer "uniform" has even ones at every width: a little more error, and
levels that need no table. alpha is one of `CANDIDATES` times the root mean square of h / sigma over the group's coded
channels, the one with the least weighted squared error, as float16 or one byte holds it; decoding costs the same as
with any other scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from aatc_cli.core.curves import DISTORTION, DISTORTION_UNIFORM, restoring_gain
from aatc_cli.core.lloyd_levels import LLOYD_BITS, levels, uniform_step
from aatc_cli.core.moving import moved
from aatc_cli.core.scales import rounded_scale

CANDIDATES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
# numbers that are tried at once: what a core's cache holds, and what keeps a GPU busy
_AT_ONCE = 1 << 18
_AT_ONCE_ON_GPU = 1 << 26
# widths up to which a CPU compares with every threshold
_COMPARED = 5


@dataclass(frozen=True)
class Span:
    """Neighbours among the coded channels that share a width: thresholds between their levels, or one step.

    gain: what levels are multiplied with when codes are read; the search for a scale and codes goes by the levels.
    """

    channels: slice
    width: int
    thresholds: Tensor
    points: Tensor
    step: float
    gain: float = 1.0

    def nearest(self, z: Tensor) -> Tensor:
        """Indices of the levels nearest to ``z``, in z's dtype."""
        if self.step:
            half = 2.0 ** (self.width - 1)
            return torch.floor(z / self.step).add_(half).clamp_(0, 2 * half - 1)
        if z.is_cuda or self.width > _COMPARED:
            return torch.bucketize(z, self.thresholds).to(z.dtype)
        # a core compares many numbers at once, and searches for one after another
        found, above = torch.zeros_like(z), torch.empty_like(z)
        for edge in self.thresholds.tolist():
            found.add_(torch.gt(z, edge, out=above))
        return found

    def values(self, index: Tensor) -> Tensor:
        """What indices are read as: levels times the gain."""
        if self.step:
            return (index - (2.0 ** (self.width - 1) - 0.5)) * (self.step * self.gain)
        found = self.points[index.to(torch.int64)]
        return found if self.gain == 1.0 else found * self.gain

    def rounded(self, z: Tensor) -> Tensor:
        """Magnitudes of the levels nearest to ``z`` >= 0: levels lie evenly about zero, so half of them will do."""
        half = 2 ** (self.width - 1)
        if self.step:
            return (z / self.step).floor_().clamp_(max=half - 1).add_(0.5).mul_(self.step)
        if z.is_cuda:
            return self.points[half:][torch.bucketize(z, self.thresholds[half:])]
        upper = self.points[half:].tolist()
        found, above = torch.full_like(z, upper[0]), torch.empty_like(z)
        for edge, (low, high) in zip(self.thresholds[half:].tolist(), pairwise(upper), strict=True):
            found.add_(torch.gt(z, edge, out=above), alpha=high - low)
        return found


@dataclass(frozen=True)
class Tables:
    """Levels and thresholds of the channels of a site, one `Span` for every width that channels have.

    order [n]: the channels with bits, by rising width, ties in their order; spans are cut from that order, so that
    channels without bits cost nothing and every other one meets the thresholds of its own width alone. half [C] is
    2^(b-1), zero at zero bits.
    """

    bits: Tensor
    half: Tensor
    order: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        bits: Tensor,
        like: Tensor,
        uniform: bool = False,
        restored: float = 0.0,
        widths: tuple[int, ...] | None = None,
    ) -> Tables:
        """Tables for widths ``bits`` [C] on the device and in the dtype of ``like``; ``widths`` are they as numbers.

        uniform: evenly spaced levels at every width. restored: share of the lost size that reading gives back.
        """
        widths = tuple(bits.tolist()) if widths is None else widths
        order = sorted((place for place, width in enumerate(widths) if width), key=lambda place: widths[place])
        spans, start = [], 0
        for width in sorted(set(widths) - {0}):
            stop = start + widths.count(width)
            gain = restoring_gain((DISTORTION_UNIFORM if uniform else DISTORTION)[width], restored)
            spans.append(_span(slice(start, stop), width, like, uniform or width > LLOYD_BITS, gain))
            start = stop
        half = torch.where(bits > 0, torch.exp2(bits.to(torch.float64) - 1), 0.0)
        places = moved(torch.tensor(order, dtype=torch.int64), like.device)
        return cls(bits, half.to(like), places, tuple(spans))

    def nearest(self, z: Tensor) -> Tensor:
        """Indices 0 .. 2^b - 1 of the levels nearest to ``z`` [N, C]; zero at zero bits. -> [N, C] in z's dtype."""
        return self._spread(z, [span.nearest(z[:, self.order[span.channels]]) for span in self.spans])

    def values(self, index: Tensor) -> Tensor:
        """Levels of the indices [N, C]; zero at zero bits."""
        return self._spread(index, [span.values(index[:, self.order[span.channels]]) for span in self.spans])

    def rounded(self, z: Tensor) -> Tensor:
        """Magnitudes of the levels nearest to coded channels ``z`` [..., n] >= 0, in their order."""
        return torch.cat([span.rounded(z[..., span.channels].contiguous()) for span in self.spans], -1)

    @property
    def step(self) -> Tensor:
        """Spacing of the levels of every channel, zero where they have none. [C]."""
        steps = torch.zeros_like(self.half)
        for span in self.spans:
            steps[self.order[span.channels]] = span.step
        return steps

    def _spread(self, like: Tensor, parts: list[Tensor]) -> Tensor:
        found = torch.zeros_like(like)
        if parts:
            found[:, self.order] = torch.cat(parts, -1)
        return found


def _span(channels: slice, width: int, like: Tensor, even: bool, gain: float) -> Span:
    if even:
        none = torch.zeros(0).to(like)
        return Span(channels, width, none, none, uniform_step(width), gain)
    return Span(channels, width, *_placed(width, like.device, like.dtype), 0.0, gain)


# the same for every site of a plan, and a GPU is waited for with every copy
@lru_cache(maxsize=64)
def _placed(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Thresholds and levels of a width, where they are used."""
    points = levels(width)
    return ((points[1:] + points[:-1]) / 2).to(device, dtype), points.to(device, dtype)


def quantize(
    h: Tensor, sigma: Tensor, tables: Tables, weight: Tensor, groups: int, scale_bits: int = 16
) -> tuple[Tensor, Tensor]:
    """Codes [..., C] int32 in -2^(b-1) .. 2^(b-1) - 1 and token scales [..., groups] float16 of latents h [..., C].

    The scales are those that a cache with scales of ``scale_bits`` bits holds (`core.scales`).
    sigma, weight [C]: standard deviation and importance of every channel. Zero where a channel has no bits.
    """
    rows = h.reshape(-1, h.shape[-1])
    codes = torch.zeros_like(rows, dtype=torch.int32)
    alpha = torch.zeros(rows.shape[0], groups, dtype=torch.float16, device=h.device)
    size = len(CANDIDATES) * max(tables.order.numel(), 1)
    step = max((_AT_ONCE if h.device.type == "cpu" else _AT_ONCE_ON_GPU) // size, 1)
    for start in range(0, rows.shape[0] if tables.spans else 0, step):
        part = slice(start, start + step)
        codes[part], alpha[part] = _quantize_rows(rows[part], sigma, tables, weight, groups, scale_bits)
    return codes.reshape(h.shape), alpha.reshape(*h.shape[:-1], groups)


def _quantize_rows(
    rows: Tensor, sigma: Tensor, tables: Tables, weight: Tensor, groups: int, scale_bits: int
) -> tuple[Tensor, Tensor]:
    """`quantize` of rows [N, C] that have coded channels, all candidates at once."""
    order = tables.order
    owner = order // (rows.shape[1] // groups)
    spread = sigma[order]
    unit = rows.index_select(1, order) / torch.where(spread > 0, spread, torch.ones_like(spread))
    unit = unit.clamp(torch.finfo(unit.dtype).min, torch.finfo(unit.dtype).max)
    # squares are of shares of the group's loudest channel: those of the latents themselves may overflow
    size, whole = unit.abs(), torch.zeros_like(rows)
    # not by scatter_reduce: on a GPU all channels of a row would wait for one another at one address
    whole[:, order] = size
    loudest = torch.unflatten(whole, 1, (groups, -1)).amax(-1).clamp_min(torch.finfo(unit.dtype).tiny)
    peak = loudest.index_select(1, owner)
    member = (owner[:, None] == torch.arange(groups, device=owner.device)).to(unit.dtype)
    rms = loudest * ((unit / peak).square() @ member / member.sum(0).clamp_min(1)).sqrt()
    price = (weight * sigma.square())[order]
    alphas = torch.stack([rounded_scale(rms * factor, scale_bits) for factor in CANDIDATES])
    wide = alphas.to(unit.dtype)
    safe = torch.where(wide > 0, wide, torch.ones_like(wide)).index_select(-1, owner)
    nearest = tables.rounded(size / safe).mul_(wide.index_select(-1, owner))
    errors = nearest.sub_(size).div_(peak).square_() @ (member * price[:, None])
    # the first of equals, as a search one after another finds it
    best = errors.argmin(0)
    alpha = alphas.gather(0, best[None])[0]
    index = torch.zeros_like(rows)
    z = _divided(unit, alpha.to(unit.dtype).index_select(1, owner))
    index[:, order] = torch.cat([span.nearest(z[:, span.channels].contiguous()) for span in tables.spans], -1)
    return torch.where(tables.bits > 0, index - tables.half, torch.zeros_like(index)).to(torch.int32), alpha


def dequantize(codes: Tensor, alpha: Tensor, sigma: Tensor, tables: Tables) -> Tensor:
    """Latents of ``codes`` [..., C]: alpha sigma level."""
    index = codes.reshape(-1, codes.shape[-1]).to(sigma.dtype) + tables.half
    return tables.values(index).reshape(codes.shape) * _by_channel(alpha, sigma) * sigma


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
