"""Product codes: parts of a head as the nearest of 256 points each, in coordinates where error is score (A2ATS).

With H = E[q^T q] = L L^T the error e of a key moves scores by e H e^T = |e L|^2, so keys are taken times L, cut into
parts of n channels, and each part becomes the index of the nearest point that k-means placed for it. Values are cut as
they are. A part of n channels at 8 bits is 8 / n bits a number.

Source: A2ATS (2502.12665), "query-aware vector quantization"; parts instead of one point for a whole head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated

CODE_BITS = 8
POINTS = 2**CODE_BITS
_ROUNDS = 8
_SEED = 0
# distances in memory together: on a CPU as many as stay near it, on a GPU as many as fill it
_NEAR, _AT_ONCE = 2**22, 2**25


@dataclass(frozen=True)
class ProductCodec:
    """points [H, parts, 256, n]; root [H, D, D]: L of every kv head, None where error is taken as it is."""

    points: Tensor
    root: Tensor | None = None

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., C] as the cache returns them, in the dtype of ``x``."""
        heads, parts, _, size = self.points.shape
        wide = torch.unflatten(x.to(torch.promote_types(x.dtype, torch.float32)), -1, (heads, -1))
        turned = wide if self.root is None else torch.einsum("...hd,hde->...he", wide, self.root.to(wide.dtype))
        rows = torch.unflatten(turned, -1, (parts, size)).flatten(0, -4)
        coded = nearest_points(rows.flatten(1, 2).transpose(0, 1), self.points.to(wide.dtype).flatten(0, 1))
        found = coded.transpose(0, 1).reshape(turned.shape)
        if self.root is not None:
            # x L = y has the solution that triangular L gives from the right
            lower = self.root.to(torch.float64)
            back = torch.linalg.inv(lower).to(wide.dtype)
            found = torch.einsum("...hd,hde->...he", found, back)
        return saturated(found.flatten(-2), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> ProductCodec:
        """Move to a device; the root stays in float64."""
        return ProductCodec(self.points.to(device, dtype), None if self.root is None else self.root.to(device))


def nearest_points(rows: Tensor, points: Tensor) -> Tensor:
    """Of rows [S, N, n] the nearest of the points [S, P, n] of the same place. -> [S, N, n]."""
    return points.gather(1, nearest(rows, points)[..., None].expand(-1, -1, points.shape[-1]))


def nearest(rows: Tensor, points: Tensor) -> Tensor:
    """Indices [S, N] of the points [S, P, n] nearest to rows [S, N, n]; the first of equals."""
    squares = points.square().sum(-1)[:, None, :]
    together = _AT_ONCE if rows.is_cuda else _NEAR
    step = max(together // (points.shape[0] * points.shape[1]), 1)
    parts = [torch.baddbmm(squares, part, points.mT, alpha=-2).argmin(-1) for part in torch.split(rows, step, 1)]
    return torch.cat(parts, 1)


def place_points(rows: Tensor, count: int = POINTS, rounds: int = _ROUNDS) -> Tensor:
    """``count`` points [S, count, n] by k-means of rows [S, N, n], from fixed rows. Held as float16 numbers, float64.

    Points whose cell is empty stay where they were; with fewer rows than points some are there twice. Distances are
    float32, as those that the codec looks at, sums float64.
    """
    near, rows = rows.to(torch.float32), rows.to(torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    chosen = torch.randperm(rows.shape[1], generator=generator)
    points = rows[:, chosen.repeat(-(-count // rows.shape[1]))[:count]].clone()
    ones = rows.new_ones(rows.shape[:2])
    for _ in range(rounds):
        index = nearest(near, points.to(torch.float32))
        inside = rows.new_zeros(points.shape[:2]).scatter_add_(1, index, ones)
        total = torch.zeros_like(points).scatter_add_(1, index[..., None].expand_as(rows), rows)
        points = torch.where(inside[..., None] > 0, total / inside.clamp_min(1)[..., None], points)
    return saturated(points, torch.float16).to(torch.float64)


def score_root(moment: Tensor, damping: float = 1e-4) -> Tensor:
    """L [H, D, D], lower triangular, of the queries' second moments [H, D, D], damped by a share of their mean."""
    moment = moment.to(torch.float64)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device)
    found: Tensor = torch.linalg.cholesky((moment + moment.mT) / 2 + damping * mean[:, None, None] * eye)
    return found
