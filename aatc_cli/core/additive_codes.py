"""Additive codes: a head's vector as a sum of entries of stages, those of keys commuting with the rotation (CommVQ).

The channels of a rotated pair are one complex number, so a key is z in C^(D/2) and position turns entry j by a phase of
its own. Entries of a stage are 16 vectors c times the quarter turns 1, i, -1, -i: the 2 x 2 blocks [[x, -y], [y, x]]
that such multiplications are commute with every rotation of the pair, so a decoder may turn a codebook's products
instead of the keys. A stage takes 6 bits for the whole head. Stages are fitted and searched one after another, each to
what those before left over. Values have 64 free entries a stage.

Source: CommVQ (2506.18879): additive quantization, commuting codebook. Its learned encoder is this search here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.vector_codes import nearest, nearest_points, place_points

STAGE_BITS = 6
ENTRIES = 2**STAGE_BITS
TURNS = 4
_ROUNDS = 8
_SEED = 0


@dataclass(frozen=True)
class AdditiveCodec:
    """entries [H, stages, 64, D] of every kv head; a vector is the sum of the nearest one of each stage."""

    entries: Tensor

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        heads = self.entries.shape[0]
        wide = torch.unflatten(x.to(torch.promote_types(x.dtype, torch.float32)), -1, (heads, -1))
        left = wide.flatten(0, -3).transpose(0, 1)
        found = torch.zeros_like(left)
        for stage in self.entries.to(wide.dtype).unbind(1):
            part = nearest_points(left, stage)
            left, found = left - part, found + part
        return saturated(found.transpose(0, 1).reshape(wide.shape).flatten(-2), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> AdditiveCodec:
        """Move to a device."""
        return AdditiveCodec(self.entries.to(device, dtype))


def stages_of(bits: int, dim: int) -> int:
    """Stages that ``bits`` a number pay for in a head of ``dim`` channels."""
    return bits * dim // STAGE_BITS


def turned(base: Tensor) -> Tensor:
    """Entries [..., 4 m, D] of vectors [..., m, D] in all quarter turns; pairs lie half a head apart."""
    first, second = base.chunk(2, -1)
    quarter = torch.cat((-second, first), -1)
    return torch.cat((base, quarter, -base, -quarter), -2)


def place_entries(rows: Tensor, stages: int) -> Tensor:
    """Free entries [H, stages, 64, D] of rows [H, N, D], stage after stage by k-means of what is left."""
    left, found = rows.to(torch.float64), []
    for _ in range(stages):
        points = place_points(left, ENTRIES)
        left = left - nearest_points(left, points)
        found.append(points)
    return torch.stack(found, 1)


def place_commuting(rows: Tensor, stages: int) -> Tensor:
    """Vectors [H, stages, 16, D] whose quarter turns are a stage's entries, fitted to rows [H, N, D].

    k-means under turns: a row belongs to a vector and a turn; a vector is the mean of its rows turned back.
    """
    left, found = rows.to(torch.float64), []
    generator = torch.Generator().manual_seed(_SEED)
    count = ENTRIES // TURNS
    chosen = torch.randperm(rows.shape[1], generator=generator).repeat(-(-count // rows.shape[1]))[:count]
    for _ in range(stages):
        base = left[:, chosen].clone()
        for _ in range(_ROUNDS):
            base = _means(left, base)
        base = saturated(base, torch.float16).to(torch.float64)
        left = left - nearest_points(left, turned(base))
        found.append(base)
    return torch.stack(found, 1)


def _means(rows: Tensor, base: Tensor) -> Tensor:
    """One round: vectors [H, m, D] as means of the rows [H, N, D] that are nearest to one of their turns."""
    count = base.shape[1]
    entries = turned(base)
    index = nearest(rows, entries)
    member, turn = index % count, index // count
    # turned back by as many quarters: forward by the rest of four
    ways = turned(rows[..., None, :])
    back = ways.gather(2, ((TURNS - turn) % TURNS)[..., None, None].expand(*index.shape, 1, rows.shape[-1]))[:, :, 0]
    inside = rows.new_zeros(base.shape[:2]).scatter_add_(1, member, torch.ones_like(rows[..., 0]))
    total = torch.zeros_like(base).scatter_add_(1, member[..., None].expand_as(back), back)
    return torch.where(inside[..., None] > 0, total / inside.clamp_min(1)[..., None], base)
