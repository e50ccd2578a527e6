"""One transform over the keys (or values) of all layers of a token: a codec that sees the layers together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from aatc_cli.core.block_codec import BlockCodec
from aatc_cli.core.casting import saturated


@runtime_checkable
class LayersCodec(Protocol):
    """A codec of one side of all layers at once; every layer of a model has the same object."""

    def reconstruct_layers(self, x: Tensor) -> Tensor:
        """The vectors [L, B, T, C] of all layers as the cache returns them, in the dtype of ``x``."""
        ...


@dataclass(frozen=True)
class JointCodec:
    """basis [L * C, q], orthonormal columns; mean [L * C]; ``inner`` codes the q latents of a token.

    A layer alone cannot be reconstructed: a token goes in when all layers have seen it. Source: KVTC (2511.01815),
    principal components over layers and heads.
    """

    basis: Tensor
    mean: Tensor
    inner: BlockCodec

    def reconstruct_layers(self, x: Tensor) -> Tensor:
        """The vectors [L, B, T, C] of all layers as the cache returns them, in the dtype of ``x``."""
        rows = x.to(torch.promote_types(x.dtype, self.basis.dtype)).permute(1, 2, 0, 3)
        basis, mean = self.basis.to(rows.dtype), self.mean.to(rows.dtype)
        latents = self.inner.reconstruct((rows.flatten(2) - mean) @ basis)
        found = latents @ basis.T + mean
        return saturated(torch.unflatten(found, 2, rows.shape[2:]).permute(2, 0, 1, 3), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> JointCodec:
        """Move to a device, matrices in ``dtype``."""
        return JointCodec(self.basis.to(device, dtype), self.mean.to(device, dtype), self.inner)


def principal_components(rows: Tensor, limit: int) -> Tensor:
    """Leading principal directions of ``rows`` [R, n], centred already, through their Gram matrix: [n, q], float64.

    q is the largest multiple of 16 within ``limit``, n and the number of directions that the rows excite.
    """
    wide = rows.to(torch.float64)
    values, vectors = torch.linalg.eigh(wide @ wide.T if rows.shape[0] < rows.shape[1] else wide.T @ wide)
    values, vectors = values.flip(0), vectors.flip(1)
    # below this share of the largest, an eigenvalue of the Gram matrix is its rounding
    alive = int((values > 1e-12 * values[0].clamp_min(torch.finfo(torch.float64).tiny)).sum())
    count = min(limit, rows.shape[1], alive) // 16 * 16
    if rows.shape[0] >= rows.shape[1]:
        return torch.clone(vectors[:, :count])
    return torch.div(wide.T @ vectors[:, :count], values[:count].sqrt())
