"""Narrower float types that saturate: a number beyond their range becomes their largest, never infinity."""

from __future__ import annotations

import torch
from torch import Tensor


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to ``dtype``, magnitudes beyond its largest number held at it. NaN stays NaN.

    A value that quantization moved outwards from the edge of float16 is off by its error; infinity would spoil every
    sum it enters.
    """
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= largest:
        return x.to(dtype)
    return x.clamp(-largest, largest).to(dtype)
