"""Token scales in one byte: a logarithmic grid instead of float16, for caches whose scales weigh much.

    code 0 is a scale of zero,   code c > 0 is 2^((c - 128) / 16),   held in float16 where it is used.

Neighbours differ by 4.4 per cent. alpha is relative to a channel's own scale, so eight octaves each way reach far.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated

_STEPS = 16  # codes per octave
_ONE = 128  # the code of scale 1


@lru_cache(maxsize=8)
def scale_grid(device: torch.device) -> Tensor:
    """The scales of all codes: float16 [256], rising."""
    codes = torch.arange(256, dtype=torch.float64)
    values = torch.where(codes > 0, torch.exp2((codes - _ONE) / _STEPS), torch.zeros_like(codes))
    return values.to(torch.float16).to(device)


def pack_scales(alpha: Tensor) -> Tensor:
    """Codes uint8 of the scales nearest to ``alpha`` on the grid, in ratio; what is not zero stays above zero."""
    places = torch.round(torch.log2(alpha.to(torch.float32)) * _STEPS) + _ONE
    codes = torch.where(alpha > 0, places.clamp(1, 255), torch.zeros_like(places))
    return codes.to(torch.uint8)


def unpack_scales(codes: Tensor) -> Tensor:
    """Scales float16 of ``codes``."""
    return scale_grid(codes.device)[codes.to(torch.int64)]


def rounded_scale(alpha: Tensor, bits: int) -> Tensor:
    """``alpha`` as a cache with scales of ``bits`` (8 or 16) bits holds it: float16, saturating."""
    half = saturated(alpha, torch.float16)
    return half if bits == 16 else unpack_scales(pack_scales(half))
