"""Whitening-based feature decorrelation: k -> @encode -> latent -> quantize -> @decode -> k^.

The paper factors W = A B through a Cholesky-whitened SVD. By its Proposition "Equivalence of Whitening-Based SVD and
PCA of XW" the right singular vectors are the eigenvectors of the second moment of K = XW, so the same transform comes
from K^T K alone: with K^T K / N = P diag(e) P^T and singular values S = sqrt(e),

    B = sqrt(S) P^T   (decode),     h = x A = k P / sqrt(S)   (encode),     H^T H / N = S.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# eigenvalues below this share of the largest are rounding noise of the float64 moment, not signal
_DEAD = 1e-13
# eigenvalues closer than this share of the largest cannot be told apart: the solver's own error is about as large
_EQUAL = 1e-14
# axes that lie as near to a space as the nearest one, up to this share, are taken in their order
_AS_NEAR = 1e-6


@dataclass(frozen=True)
class GroupTransform:
    """Transforms of head groups. encode, decode [..., E, E]: h = k @ encode, k = h @ decode. singular [..., E]: S."""

    encode: Tensor
    decode: Tensor
    singular: Tensor


def whitening(moment: Tensor) -> GroupTransform:
    """The paper's transform from the second moment ``moment`` = K^T K / N (Eq. AB-factorization): [E, E] or [G, E, E].

    Columns are ordered by falling singular value and are canonical (`canonical_basis`), so the result does not depend
    on the solver's choice. A direction the calibration never excited has S = 0: it keeps a unit scale, so that encode
    and decode stay finite and inverse of each other.
    """
    moment = moment.to(torch.float64)
    values, vectors = _falling((moment + moment.mT) / 2)
    alive = values > _DEAD * values[..., :1].clamp_min(torch.finfo(torch.float64).tiny)
    values = torch.where(alive, values.clamp_min(0), torch.zeros_like(values))
    vectors, singular = canonical_basis(values, vectors), values.sqrt()
    root = torch.where(alive, singular, torch.ones_like(singular)).sqrt()
    return GroupTransform(vectors / root[..., None, :], root[..., :, None] * vectors.mT, singular)


def loss_metric(moment: Tensor, fisher: Tensor, damping: float = 1e-4) -> GroupTransform:
    """The transform that makes a loss metric the identity and the channels uncorrelated (loss-aware KLT).

    ``fisher`` is M, the second moment of the loss gradient at the cached vectors: to second order noise d costs
    1/2 d^T M d. With M = L L^T (Cholesky) and L^T Sigma L = U diag(e) U^T, encode is L U and decode its inverse
    U^T L^-1; squared error in these coordinates is then the loss itself, and e are their second moments. M is damped by
    ``damping`` times its mean diagonal, so that directions the sample never probed keep a small price. ``singular`` is
    e, falling. Both matrices are [E, E] or [G, E, E].
    """
    moment = moment.to(torch.float64)
    factor = damped_factor(fisher.to(torch.float64), damping)
    energies, basis = _falling(factor.mT @ ((moment + moment.mT) / 2) @ factor)
    energies = energies.clamp_min(0)
    basis = canonical_basis(energies, basis)
    decode = torch.linalg.solve_triangular(factor, basis.mT, upper=False, left=False)
    return GroupTransform(factor @ basis, decode, energies)


def damped_factor(metric: Tensor, damping: float) -> Tensor:
    """The Cholesky factor L of a damped metric [..., E, E]; what rounding left below zero in it counts as zero."""
    metric = (metric + metric.mT) / 2
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    floor = (damping * mean)[..., None, None] * torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(metric + floor)
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(metric)
        factor = torch.linalg.cholesky((vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT + floor)
    return factor


def eigenbasis(moment: Tensor) -> Tensor:
    """Canonical eigenvectors [..., E, E] of second moments in falling order of their eigenvalues, as columns."""
    return canonical_basis(*_falling((moment + moment.mT) / 2))


def _falling(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest first, and eigenvectors as columns of [..., E, E]."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(-1), vectors.flip(-1)


def identity(size: int) -> GroupTransform:
    """The transform that changes nothing, for ablations and references."""
    eye = torch.eye(size, dtype=torch.float64)
    return GroupTransform(encode=eye, decode=eye, singular=torch.ones(size, dtype=torch.float64))


def canonical_basis(values: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors (columns) of eigenvalues [E] or [G, E], falling, as functions of the eigenspaces alone.

    Single ones have their signs fixed (`canonical_signs`). Of eigenvalues that float64 cannot tell apart only the space
    is determined: its basis is made of the coordinate axes nearest to it, one after another, each projected onto what
    is left of the space and brought to length one (a Cholesky factor of the projector, with pivots).
    """
    vectors = canonical_signs(vectors)
    apart = values[..., :-1] - values[..., 1:] > _EQUAL * values.abs().amax(-1, keepdim=True)
    # the device is looked at once, not for every eigenvalue
    gaps = apart.tolist()
    pairs = zip(vectors, gaps, strict=True) if vectors.dim() == 3 else [(vectors, gaps)]
    for basis, row in pairs:
        ends = [place for place, gap in enumerate(row, start=1) if gap]
        for start, stop in pairwise([0, *ends, values.shape[-1]]):
            if stop - start > 1:
                basis[:, start:stop] = canonical_signs(_axes_in(basis[:, start:stop]))
    return vectors


def _axes_in(space: Tensor) -> Tensor:
    """The basis of `canonical_basis` for the space that orthonormal columns [E, k] span. -> [E, k]."""
    rest, directions = space.clone(), []
    for _ in range(space.shape[1]):
        nearness = rest.square().sum(1)
        # argmax takes the first of equals; the index stays on the device
        axis = (nearness >= (1 - _AS_NEAR) * nearness.max()).to(torch.int32).argmax()
        row = rest.index_select(0, axis[None])[0]
        direction = row / row.norm()
        rest = rest - torch.outer(rest @ direction, direction)
        directions.append(direction)
    return space @ torch.stack(directions, 1)


def canonical_signs(vectors: Tensor) -> Tensor:
    """Flip columns of ``vectors`` [..., E, k] so that their largest component (the first of equals) is positive."""
    picked = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(picked < 0, -1.0, 1.0)


def group_moments(moment: Tensor, groups: int) -> list[Tensor]:
    """The diagonal blocks [E, E] of a site's moment [C, C], one per head group (paper, Remark head-group)."""
    size = moment.shape[0] // groups
    return [moment[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)]


def encode(x: Tensor, matrices: Tensor) -> Tensor:
    """Latents of ``x`` [..., C] under ``matrices`` [groups, E, E]. -> [..., C]."""
    return _by_group(x, matrices)


def decode(h: Tensor, matrices: Tensor) -> Tensor:
    """Vectors of latents ``h`` [..., C] under the decode ``matrices`` [groups, E, E]. -> [..., C]."""
    return _by_group(h, matrices)


def _by_group(x: Tensor, matrices: Tensor) -> Tensor:
    groups, size, _ = matrices.shape
    if groups == 1:
        return x @ matrices[0]
    return torch.einsum("...ge,gef->...gf", torch.unflatten(x, -1, (groups, size)), matrices).flatten(-2)


def rotation(matrices: Tensor) -> GroupTransform:
    """The transforms that are orthonormal matrices [G, E, E]."""
    return GroupTransform(matrices.contiguous(), matrices.mT.contiguous(), torch.ones_like(matrices[..., 0]))
