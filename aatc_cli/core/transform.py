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
    """Transform of one head group. encode, decode [E, E]: h = k @ encode, k = h @ decode. singular [E]: S."""

    encode: Tensor
    decode: Tensor
    singular: Tensor


def whitening(moment: Tensor) -> GroupTransform:
    """The paper's transform from the second moment ``moment`` [E, E] = K^T K / N (Eq. AB-factorization).

    Columns are ordered by falling singular value and are canonical (`canonical_basis`), so the result does not depend
    on the solver's choice. A direction the calibration never excited has S = 0: it keeps a unit scale, so that encode
    and decode stay finite and inverse of each other.
    """
    moment = moment.to(torch.float64)
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    values = values.flip(0)
    alive = values > _DEAD * values[0].clamp_min(torch.finfo(torch.float64).tiny)
    values = torch.where(alive, values.clamp_min(0), torch.zeros_like(values))
    vectors, singular = canonical_basis(values, vectors.flip(1)), values.sqrt()
    root = torch.where(alive, singular, torch.ones_like(singular)).sqrt()
    return GroupTransform(encode=vectors / root, decode=root[:, None] * vectors.T, singular=singular)


def loss_metric(moment: Tensor, fisher: Tensor, damping: float = 1e-4) -> GroupTransform:
    """The transform that makes a loss metric the identity and the channels uncorrelated (loss-aware KLT).

    ``fisher`` [E, E] is M, the second moment of the loss gradient at the cached vectors: to second order noise d costs
    1/2 d^T M d. With M^(1/2) Sigma M^(1/2) = U diag(e) U^T, encode is M^(1/2) U and decode its inverse U^T M^(-1/2);
    squared error in these coordinates is then the loss itself, and e are their second moments. M is damped by
    ``damping`` times its mean diagonal, so that directions the sample never probed keep a small price.
    ``singular`` is e, falling.
    """
    moment, fisher = moment.to(torch.float64), fisher.to(torch.float64)
    values, vectors = torch.linalg.eigh((fisher + fisher.T) / 2)
    floor = damping * values.mean().clamp_min(torch.finfo(torch.float64).tiny)
    values = values.clamp_min(0) + floor
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors / values.sqrt()) @ vectors.T
    energies, basis = torch.linalg.eigh(root @ ((moment + moment.T) / 2) @ root)
    energies = energies.flip(0).clamp_min(0)
    basis = canonical_basis(energies, basis.flip(1))
    return GroupTransform(encode=root @ basis, decode=basis.T @ inverse, singular=energies)


def identity(size: int) -> GroupTransform:
    """The transform that changes nothing, for ablations and references."""
    eye = torch.eye(size, dtype=torch.float64)
    return GroupTransform(encode=eye, decode=eye, singular=torch.ones(size, dtype=torch.float64))


def canonical_basis(values: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors [E, E] (columns) of eigenvalues [E], falling, as functions of the eigenspaces alone.

    Single ones have their signs fixed (`canonical_signs`). Of eigenvalues that float64 cannot tell apart only the space
    is determined: its basis is made of the coordinate axes nearest to it, one after another, each projected onto what
    is left of the space and brought to length one (a Cholesky factor of the projector, with pivots).
    """
    vectors = canonical_signs(vectors)
    apart = values[:-1] - values[1:] > _EQUAL * values.abs().max()
    ends = [int(place) + 1 for place in apart.nonzero()]
    for start, stop in pairwise([0, *ends, values.numel()]):
        if stop - start > 1:
            vectors[:, start:stop] = canonical_signs(_axes_in(vectors[:, start:stop]))
    return vectors


def _axes_in(space: Tensor) -> Tensor:
    """The basis of `canonical_basis` for the space that orthonormal columns [E, k] span. -> [E, k]."""
    rest, directions = space.clone(), []
    for _ in range(space.shape[1]):
        nearness = rest.square().sum(1)
        axis = int((nearness >= (1 - _AS_NEAR) * nearness.max()).nonzero()[0])
        direction = rest[axis] / rest[axis].norm()
        rest = rest - torch.outer(rest @ direction, direction)
        directions.append(direction)
    return space @ torch.stack(directions, 1)


def canonical_signs(vectors: Tensor) -> Tensor:
    """Flip each column of ``vectors`` so that its component of largest magnitude is positive (first one on ties)."""
    picked = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
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
