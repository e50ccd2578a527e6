"""Sampled rows of a site by head, no more than fitting a codebook takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# rows that codebooks are fitted to; 8 for each of 256 points
MOST = 2048


def head_rows(rows: Tensor, heads: int) -> Tensor:
    """Evenly spaced ones of rows [R, C], by head: [H, R', D]."""
    import torch

    step = max(-(-rows.shape[0] // MOST), 1)
    found: Tensor = torch.unflatten(rows[::step], 1, (heads, -1)).transpose(0, 1).contiguous()
    return found
