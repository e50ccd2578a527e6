"""The paper's scalar quantizer ("The right scaling"): channel scale s_c times token scale alpha, 2^b uniform levels.

    alpha = max over the group's coded channels of |h_c / s_c|,   step = 2 alpha s_c / 2^b,
    code  = clamp(floor(h / step + 1/2), -2^(b-1), 2^(b-1) - 1),  h^ = step * code.

The code range is asymmetric, as published: one level more below zero than above. alpha is held in float16, or in
one byte (`core.scales`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.scales import rounded_scale


def token_scale(h: Tensor, scale: Tensor, bits: Tensor, groups: int, scale_bits: int = 16) -> Tensor:
    """alpha of every token and head group, as the cache holds it. h [..., C], scale [C], bits [C] -> [..., groups].

    The maximum runs over channels that are stored (bits > 0): a channel that is dropped must not coarsen the others.
    """
    ratio = torch.where(bits > 0, (h / scale).abs(), torch.zeros_like(h))
    alpha = torch.unflatten(ratio, -1, (groups, -1)).amax(-1)
    return rounded_scale(alpha, scale_bits)


def steps(alpha: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """Quantizer step of every token and channel: 2 alpha s_c / 2^b. alpha [..., groups] -> [..., C]."""
    unit = scale * torch.exp2(1.0 - bits.to(scale.dtype))
    groups = alpha.shape[-1]
    return (alpha.to(scale.dtype).unsqueeze(-1) * torch.unflatten(unit, -1, (groups, -1))).flatten(-2)


def quantize(h: Tensor, alpha: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """Codes of latents ``h`` [..., C] as int32; zero where the channel has no bits or the token scale is zero."""
    step = steps(alpha, scale, bits)
    low, high = code_range(bits)
    raw = torch.floor(h / torch.where(step > 0, step, torch.ones_like(step)) + 0.5)
    codes = torch.minimum(torch.maximum(raw, low.to(raw.dtype)), high.to(raw.dtype))
    return torch.where((bits > 0) & (step > 0), codes, torch.zeros_like(codes)).to(torch.int32)


def dequantize(codes: Tensor, alpha: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """Latents of ``codes`` [..., C]; inverse of `quantize` up to half a step inside the code range."""
    return codes.to(scale.dtype) * steps(alpha, scale, bits)


def code_range(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest code of every channel: -2^(b-1) and 2^(b-1) - 1; both zero at zero bits."""
    half = (bits > 0) * 2 ** (bits.to(torch.int64) - 1).clamp_min(0)
    return -half, (half - 1).clamp_min(0)


def noise_variance(alpha: Tensor, scale: Tensor, bits: Tensor, variance: Tensor) -> Tensor:
    """White-noise model of E[(dh)^2] per token and channel: step^2 / 12 where coded, the variance where dropped.

    Paper, Eq. noise-model. alpha [..., groups], variance [C] -> [..., C].
    """
    coded = steps(alpha, scale, bits).square() / 12.0
    return torch.where(bits > 0, coded, variance.to(coded.dtype).expand_as(coded))
