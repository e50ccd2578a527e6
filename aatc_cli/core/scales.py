"""Token scales in 8 or 4 bits: a logarithmic grid instead of float16, for caches whose scales weigh much.

    code 0 is a scale of zero,   code c > 0 is 2^((c - 128) / 16), or 2^((c - 9) 2 / 5) in 4 bits,

held in float16 where it is used. Neighbours differ by 4.4 per cent, or by a third, which is how far the candidates of a
searched scale lie apart. alpha is relative to a channel's own scale, so eight octaves each way reach far.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated

# by bits of a scale: codes per octave, and the code of scale 1
SCALE_STEPS = {8: (16.0, 128), 4: (2.5, 9)}


@lru_cache(maxsize=8)
def scale_grid(device: torch.device, bits: int = 8) -> Tensor:
    """The scales of all codes: float16 [2^bits], rising."""
    steps, one = SCALE_STEPS[bits]
    codes = torch.arange(2**bits, dtype=torch.float64)
    values = torch.where(codes > 0, torch.exp2((codes - one) / steps), torch.zeros_like(codes))
    return values.to(torch.float16).to(device)


def pack_scales(alpha: Tensor, bits: int = 8) -> Tensor:
    """Codes uint8 of the scales nearest to ``alpha`` on the grid, in ratio; what is not zero stays above zero."""
    steps, one = SCALE_STEPS[bits]
    places = torch.round(torch.log2(alpha.to(torch.float32)) * steps) + one
    codes = torch.where(alpha > 0, places.clamp(1, 2**bits - 1), torch.zeros_like(places))
    return codes.to(torch.uint8)


def unpack_scales(codes: Tensor, bits: int = 8) -> Tensor:
    """Scales float16 of ``codes``."""
    return scale_grid(codes.device, bits)[codes.to(torch.int64)]


def rounded_scale(alpha: Tensor, bits: int) -> Tensor:
    """``alpha`` as a cache with scales of ``bits`` (4, 8 or 16) bits holds it: float16, saturating."""
    half = saturated(alpha, torch.float16)
    return half if bits == 16 else unpack_scales(pack_scales(half, bits), bits)
