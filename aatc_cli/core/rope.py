"""Rotary position embedding, half-split or interleaved, for re-rotating reconstructed keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# how the pairs of a rotary embedding lie: half a rotary width apart (and with tables that hold every angle once
# instead of twice), side by side, or there is no rotation at all
RopeStyle = Literal["half", "half-once", "interleaved", "none"]


def rotate_half(x: Tensor) -> Tensor:
    """Map each rotary pair (a, b), stored half a vector apart, to (-b, a). [..., R] -> [..., R]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Map each rotary pair (a, b), stored side by side, to (-b, a). [..., R] -> [..., R]."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle = "half") -> Tensor:
    """Rotate ``x`` [B, H, T, D] by the tables ``cos``, ``sin`` [B, T, R]; dimensions beyond R pass unrotated.

    The tables hold every angle twice, laid out as ``style`` has the pairs, or once [B, T, R / 2] for "half-once". The
    result is in the dtype of ``x``.
    """
    if style == "none":
        return x
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if style == "half-once":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    quarter = rotate_pairs(turned) if style == "interleaved" else rotate_half(turned)
    turned = (turned * cos + quarter * sin).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def unapply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle = "half") -> Tensor:
    """Transpose of `apply_rope`, and its inverse for tables of unit modulus: rotate by the opposite angle."""
    return apply_rope(x, cos, -sin, style)
