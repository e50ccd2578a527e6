"""Optimal singular value shrinkage of noisy low-rank matrices, and a cache that is the low rank and what is left.

Of X [n, p] = S + Z the eigenvalues of X^T X below the edge of the bulk are those of noise whose covariance is not known
but separable. With their Stieltjes transforms m1 (of Z^T Z), m2 (of Z Z^T) and T(z) = z m1(z) m2(z) a singular value s
above the edge is best shrunk, in squared error, to

    phi = T(s^2) / (s |T'(s^2)|).

Sources: eOptShrink (2207.03466) for edge, imputed noise and shrinkage; eOptShrinkQ (2605.02905) for their use here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.plain import NormedLloyd

LEVELS = 16
_ROUNDS = 20


@dataclass(frozen=True)
class ShrunkResidual:
    """A codec of rotated vectors [..., T, C] by blocks of ``block`` tokens and heads of ``dim`` channels.

    A block is up to ``rank`` directions, factors at four bits on 16 levels of its own, and a residual as
    `plain.NormedLloyd` has it.
    """

    bits: int
    block: int
    dim: int
    rank: int

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors as the cache returns them, in the dtype of ``x``; tokens behind the last whole block exact."""
        whole = x.shape[-2] // self.block * self.block
        wide = x[..., :whole, :].to(torch.promote_types(x.dtype, torch.float32))
        # [..., blocks, tokens, heads, D] -> [..., blocks, heads, tokens, D]
        heads = torch.unflatten(wide, -1, (-1, self.dim))
        blocks = torch.unflatten(heads, -3, (-1, self.block)).transpose(-3, -2)
        if blocks.numel():
            left, values, right = shrunk_factors(blocks.to(torch.float64), self.rank)
            residual = blocks - ((left * values) @ right.mT).to(blocks.dtype)
            kept = coded_factors(left, values, right).to(blocks.dtype)
            blocks = kept + NormedLloyd(self.bits, self.dim).reconstruct(residual)
        back = blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2)
        return torch.cat((saturated(back, x.dtype), x[..., whole:, :]), -2)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> ShrunkResidual:
        """Nothing to move."""
        return self


def shrunk_factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors [..., n, r] and [..., p, r] and shrunken values [..., 1, r] of x [..., n, p], r = ``rank``.

    Values of directions that are not told from noise are zero.
    """
    if x.shape[-2] < x.shape[-1]:
        right, value, left = shrunk_factors(x.mT, rank)
        return left, value, right
    eigenvalues, vectors = torch.linalg.eigh(x.mT @ x / x.shape[-2])
    lam, right = eigenvalues.flip(-1).clamp_min(0), vectors.flip(-1)[..., :rank]
    value = (lam[..., :rank] * x.shape[-2]).sqrt()
    left = x @ right / torch.where(value > 0, value, torch.ones_like(value))[..., None, :]
    return left, (value * shrinkage(lam, x.shape[-2], rank))[..., None, :], right


def shrinkage(lam: Tensor, rows: int, rank: int) -> Tensor:
    """phi over s of the ``rank`` largest of the eigenvalues lam [..., p], falling, of X^T X / rows. -> [..., rank].

    Edge and imputed noise are made of the k-th and 2k-th eigenvalues behind the directions found, k = floor(p^c).
    """
    size = int(lam.shape[-1])
    inner = max(int(size ** min(1 / 2.01, 1 / math.log(math.log(max(size, 16))))), 1)
    reach = 1 / (2 ** (2 / 3) - 1)
    edge = lam[..., inner] + reach * (lam[..., inner] - lam[..., 2 * inner])
    found = ((lam / edge.clamp_min(torch.finfo(lam.dtype).tiny)[..., None] - 1) > size ** (-1 / 3)).sum(-1)
    found = found.clamp_max(min(inner, rank))
    places = torch.arange(size, device=lam.device)
    first = lam.gather(-1, (found + inner).clamp_max(size - 1)[..., None])
    second = lam.gather(-1, (found + 2 * inner).clamp_max(size - 1)[..., None])
    order = (places - found[..., None]).clamp(0, inner) / inner
    imputed = first + reach * (1 - order ** (2 / 3)) * (first - second)
    noise = torch.where(places < (found + inner)[..., None], imputed, lam)
    is_noise = (places >= found[..., None]).to(lam.dtype)
    z = lam[..., :rank]
    gap = noise[..., None, :] - z[..., :, None]
    # a direction that coincides with noise is none: its shrinkage is zero below
    gap = torch.where(gap.abs() > 1e-12 * z[..., :, None].clamp_min(1e-300), gap, torch.ones_like(gap))
    weight = is_noise[..., None, :] / is_noise.sum(-1)[..., None, None]
    ratio = size / rows
    m1, d1 = (weight / gap).sum(-1), (weight / gap.square()).sum(-1)
    safe = torch.where(z > 0, z, torch.ones_like(z))
    m2, d2 = ratio * m1 - (1 - ratio) / safe, ratio * d1 + (1 - ratio) / safe.square()
    product = safe * m1 * m2
    slope = m1 * m2 + safe * (d1 * m2 + m1 * d2)
    shrunk = product / (safe * slope.abs().clamp_min(torch.finfo(lam.dtype).tiny))
    return torch.where(places[:rank] < found[..., None], shrunk.clamp(0, 1), torch.zeros_like(shrunk))


def coded_factors(left: Tensor, values: Tensor, right: Tensor) -> Tensor:
    """The low rank [..., n, p] of factors at four bits, on 16 levels fitted to both, and float16 values."""
    used = values > 0
    entries = torch.cat((left, right), -2)
    flat = torch.where(used, entries, torch.zeros_like(entries)).flatten(-2)
    mass = used.expand_as(entries).flatten(-2).to(entries.dtype)
    points = fitted_levels(flat, mass)
    middle = (points[..., 1:] + points[..., :-1]) / 2
    index = torch.searchsorted(middle, flat)
    coded = torch.unflatten(points.gather(-1, index), -1, entries.shape[-2:])
    first, second = coded[..., : left.shape[-2], :], coded[..., left.shape[-2] :, :]
    held = saturated(values, torch.float16).to(values.dtype)
    return (first * held) @ second.mT


def fitted_levels(values: Tensor, mass: Tensor) -> Tensor:
    """16 float16 levels, rising, for each row of values [..., n] with weights of zero or one: Lloyd's rounds."""
    count = mass.sum(-1, keepdim=True).clamp_min(1)
    spread = ((values.square() * mass).sum(-1, keepdim=True) / count).sqrt()
    grid = torch.linspace(-2.5, 2.5, LEVELS, dtype=values.dtype, device=values.device)
    points = spread * grid
    for _ in range(_ROUNDS):
        index = torch.searchsorted((points[..., 1:] + points[..., :-1]) / 2, values)
        inside = torch.zeros_like(points).scatter_add_(-1, index, mass)
        total = torch.zeros_like(points).scatter_add_(-1, index, mass * values)
        points = torch.where(inside > 0, total / inside.clamp_min(1), points).sort(-1).values
    return saturated(points, torch.float16).to(values.dtype)
