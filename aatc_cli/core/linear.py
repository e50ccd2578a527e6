"""A linear map around another codec: x -> (x - mean) @ encode -> coded -> @ decode + mean, by head group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.hadamard import hadamard
from aatc_cli.core.moving import moved
from aatc_cli.core.transform import decode, encode


@dataclass(frozen=True)
class LinearCodec:
    """encode [groups, E, R], decode [groups, R, E]; ``inner`` codes latents [..., groups * R]; mean [C] or None.

    R < E is a low-rank cache: the directions that are missing read back as the mean's.
    """

    encode: Tensor
    decode: Tensor
    inner: Any
    mean: Tensor | None = None

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., T, C] as the cache returns them, in the dtype of ``x``."""
        wide = x.to(torch.promote_types(x.dtype, self.encode.dtype))
        centred = wide if self.mean is None else wide - self.mean.to(wide.dtype)
        latents = self.inner.reconstruct(encode(centred, self.encode.to(wide.dtype)))
        found = decode(latents, self.decode.to(wide.dtype))
        return saturated(found if self.mean is None else found + self.mean.to(wide.dtype), x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> LinearCodec:
        """Move to a device, matrices in ``dtype``."""
        mean = None if self.mean is None else moved(self.mean, device, dtype)
        return LinearCodec(
            moved(self.encode, device, dtype), moved(self.decode, device, dtype), self.inner.to(device, dtype), mean
        )


def truncated(encode: Tensor, decode: Tensor, rank: int, *, rotate: bool = False) -> tuple[Tensor, Tensor]:
    """The leading ``rank`` latents of every group, mixed by a Hadamard matrix where ``rotate`` is set.

    encode [groups, E, E], decode [groups, E, E] -> [groups, E, rank], [groups, rank, E]. Source: Palu (2407.21118),
    "quantization compatibility": the Hadamard matrix is orthonormal, so it leaves the product as it was.
    """
    first, second = encode[:, :, :rank], decode[:, :rank]
    if not rotate:
        return first, second
    mix = hadamard(rank).to(encode)
    return first @ mix, mix.T @ second
