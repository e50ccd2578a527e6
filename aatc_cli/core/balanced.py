"""Balanced min-max: a tile of tokens whose rows and columns are brought to one spread before it is quantized (KVarN).

A tile X [rows, columns] is divided by a scale for every column and one for every row, found in turns as Sinkhorn finds
them for sums: spreads of the columns are divided out, then those of the rows, and so on. What is left is coded between
minimum and maximum of every row. Rows of keys are channels, rows of values are tokens.

Source: KVarN (2606.03458), and the golden reference of its public kernels for the order of the steps and their bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.casting import saturated

ROUNDS = 16
# bounds of a spread that is divided out in one step, and of the logarithm of a scale
_SPREAD = (1e-3, 1e3)
_LOG_SCALE = (-0.3, 10.0)
_LEAST_SPREAD, _LEAST_STEP = 1e-8, 1e-10


@dataclass(frozen=True)
class BalancedMinMax:
    """A codec of one site's rotated vectors [..., T, C]. tile: tokens coded together; dim: channels of a head.

    Every row of a tile has a step and a minimum, every column a scale, all float16.
    """

    side: Side
    bits: int
    tile: int
    dim: int

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors as the cache returns them, in the dtype of ``x``; tokens behind the last whole tile exact."""
        whole = x.shape[-2] // self.tile * self.tile
        wide = x[..., :whole, :].to(torch.promote_types(x.dtype, torch.float32))
        # [..., tiles, tokens, heads, D] -> [..., tiles, heads, D, tokens]
        heads = torch.unflatten(wide, -1, (-1, self.dim))
        tiles = torch.unflatten(heads, -3, (-1, self.tile)).movedim(-3, -1)
        found = coded_tile(tiles if self.side == "k" else tiles.mT, self.bits)
        back = (found if self.side == "k" else found.mT).movedim(-1, -3)
        return torch.cat((saturated(back.flatten(-4, -3).flatten(-2), x.dtype), x[..., whole:, :]), -2)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> BalancedMinMax:
        """Nothing to move."""
        return self


def coded_tile(tile: Tensor, bits: int) -> Tensor:
    """Tiles [..., rows, columns] as codes of ``bits`` with float16 scales give them back."""
    if tile.numel() == 0:
        return tile
    columns, rows = balancing_scales(tile)
    balanced = tile / columns / rows
    low, high = balanced.amin(-1, keepdim=True), balanced.amax(-1, keepdim=True)
    steps = 2**bits - 1
    step = ((high - low) / steps).clamp_min(_LEAST_STEP)
    codes = torch.round((balanced - low) / step).clamp(0, steps)
    held = [saturated(part, torch.float16).to(tile.dtype) for part in (rows * step, rows * low, columns)]
    return (codes * held[0] + held[1]) * held[2]


def balancing_scales(tile: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Scales of columns [..., 1, n] and of rows [..., m, 1] of tiles [..., m, n], the best of all rounds.

    The best is the least imbalance: largest over smallest spread of the columns, plus the same of the rows.
    """
    column = torch.zeros_like(tile[..., :1, :])
    row = torch.zeros_like(tile[..., :, :1])
    best_column, best_row, least = column.exp(), row.exp(), _imbalance(tile)
    current = tile
    for _ in range(rounds):
        column = (column + current.std(-2, keepdim=True).clamp(*_SPREAD).log()).clamp(*_LOG_SCALE)
        current = tile / column.exp() / row.exp()
        row = (row + current.std(-1, keepdim=True).clamp(*_SPREAD).log()).clamp(*_LOG_SCALE)
        current = tile / column.exp() / row.exp()
        found = _imbalance(current)
        better = found <= least
        best_column = torch.where(better, column.exp(), best_column)
        best_row = torch.where(better, row.exp(), best_row)
        least = torch.where(better, found, least)
    return best_column, best_row


def _imbalance(tile: Tensor) -> Tensor:
    """Of tiles [..., m, n] -> [..., 1, 1]."""
    parts = [tile.std(dim, keepdim=True).amax((-2, -1), keepdim=True) for dim in (-2, -1)]
    least = [tile.std(dim, keepdim=True).amin((-2, -1), keepdim=True).clamp_min(_LEAST_SPREAD) for dim in (-2, -1)]
    return parts[0] / least[0] + parts[1] / least[1]
