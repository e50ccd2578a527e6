"""Layers that share what they cache: one basis for a group of layers (xKV), or one direction for two (MiniCache)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated

# place of the shared direction between the lower layer's (0) and the upper one's (1)
BETWEEN = 0.6


def layer_groups(layers: int, size: int) -> list[range]:
    """Neighbouring layers in groups of ``size``; the last group holds what is left."""
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


@dataclass(frozen=True)
class SharedBasis:
    """Groups of layers, each with a basis [n C, r] of orthonormal columns and a codec of its r latents.

    Source: xKV (2503.18893). A layer alone cannot be reconstructed.
    """

    groups: tuple[range, ...]
    bases: tuple[Tensor, ...]
    inner: tuple[Any, ...]

    def reconstruct_layers(self, x: Tensor) -> Tensor:
        """The vectors [L, B, T, C] of all layers as the cache returns them, in the dtype of ``x``."""
        found = torch.zeros_like(x)
        for group, basis, inner in zip(self.groups, self.bases, self.inner, strict=True):
            if basis.shape[1] == 0:
                continue
            span = slice(group.start, group.stop)
            rows = x[span].to(torch.promote_types(x.dtype, basis.dtype)).permute(1, 2, 0, 3)
            latents = inner.reconstruct(rows.flatten(2) @ basis.to(rows.dtype))
            back = torch.unflatten(latents @ basis.to(rows.dtype).T, 2, rows.shape[2:])
            found[span] = saturated(back.permute(2, 0, 1, 3), x.dtype)
        return found

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> SharedBasis:
        """Move to a device, bases in ``dtype``."""
        inner = tuple(codec.to(device) for codec in self.inner)
        return SharedBasis(self.groups, tuple(basis.to(device, dtype) for basis in self.bases), inner)


@dataclass(frozen=True)
class MergedPairs:
    """Layers below ``first`` alone, those from it on in pairs that share a direction for every head of a token.

    alone: codes rows of one layer, and directions; retained: codes the rows of tokens that are not merged, as many as
    ``kept`` of every ``block`` tokens, those whose directions lie furthest apart. dim: channels of a head.
    Source: MiniCache (2405.14366): directions by spherical interpolation, lengths of both layers kept.
    """

    first: int
    dim: int
    block: int
    kept: int
    alone: Any
    retained: Any

    def reconstruct_layers(self, x: Tensor) -> Tensor:
        """The vectors [L, B, T, C] of all layers, T whole blocks, as the cache returns them, in the dtype of ``x``."""
        found = [self.alone.reconstruct(layer) for layer in x[: self.first]]
        for place in range(self.first, x.shape[0], 2):
            if place + 1 == x.shape[0]:
                found.append(self.alone.reconstruct(x[place]))
            else:
                found += list(self._pair(x[place], x[place + 1]))
        return torch.stack(found)

    def _pair(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, T, C] of two layers as the cache returns them."""
        wide = torch.promote_types(lower.dtype, torch.float32)
        heads = [torch.unflatten(part.to(wide), -1, (-1, self.dim)) for part in (lower, upper)]
        norms = [part.norm(dim=-1, keepdim=True) for part in heads]
        units = [part / torch.where(n > 0, n, torch.ones_like(n)) for part, n in zip(heads, norms, strict=True)]
        direction, angle = between(units[0], units[1])
        shared = torch.unflatten(self.alone.reconstruct(direction.flatten(-2)), -1, (-1, self.dim))
        apart = torch.unflatten(angle.mean((-2, -1)), -1, (-1, self.block))
        places = apart.topk(self.kept, -1).indices
        alone = torch.zeros_like(apart, dtype=torch.bool).scatter_(-1, places, True).flatten(-2)[..., None]
        rows = []
        for whole, norm in zip((lower, upper), norms, strict=True):
            merged = (shared * saturated(norm, torch.float16).to(wide)).flatten(-2)
            rows.append(saturated(torch.where(alone, self.retained.reconstruct(whole.to(wide)), merged), whole.dtype))
        return rows[0], rows[1]

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> MergedPairs:
        """Move to a device."""
        alone, retained = self.alone.to(device), self.retained.to(device)
        return MergedPairs(self.first, self.dim, self.block, self.kept, alone, retained)


def between(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The direction between unit vectors [..., D], and the angle that they make over pi, [..., 1]."""
    cosine = (lower * upper).sum(-1, keepdim=True).clamp(-1, 1)
    angle = torch.arccos(cosine)
    sine = torch.sin(angle)
    # directions that coincide, or that are opposite, have no great circle of their own: a straight line serves
    near = sine < 1e-4
    safe = torch.where(near, torch.ones_like(sine), sine)
    first = torch.where(near, torch.full_like(sine, 1 - BETWEEN), torch.sin((1 - BETWEEN) * angle) / safe)
    second = torch.where(near, torch.full_like(sine, BETWEEN), torch.sin(BETWEEN * angle) / safe)
    return first * lower + second * upper, angle / math.pi
