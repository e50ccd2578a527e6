"""Rotary position embedding in the half-split convention, for re-rotating reconstructed keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    """Map each rotary pair (a, b), stored half a vector apart, to (-b, a). [..., R] -> [..., R]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [B, H, T, D] by the tables ``cos``, ``sin`` [B, T, R]; dimensions beyond R pass unrotated."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def unapply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverse of `apply_rope` for tables of unit modulus (cos^2 + sin^2 = 1): rotate by the opposite angle."""
    return apply_rope(x, cos, -sin)
