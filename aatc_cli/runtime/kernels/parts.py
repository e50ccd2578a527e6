"""Products of bfloat16 rows with float32 matrices on tensor cores: the matrix as a sum of three bfloat16 ones.

Tensor cores multiply bfloat16 numbers exactly and add them up in float32, so that nothing is lost that a product of
float32 numbers would keep: 3 x 8 significant bits are the 24 of a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.runtime.kernels.received_rows import prompt_kernels

_PARTS, _BLOCK = 3, 128


def parts_of(matrix: Tensor) -> Tensor:
    """Matrices bfloat16 [3, H, E, F], each less than the one before, whose sum is a float32 one [H, E, F]."""
    found, left = [], matrix
    for _ in range(_PARTS):
        found.append(left.to(torch.bfloat16))
        left = left - found[-1].to(torch.float32)
    return torch.stack(found)


def latents_by_parts(rows: Tensor, parts: Tensor) -> Tensor | None:
    """Rows bfloat16 [n, t, H, E] times `parts_of` square matrices: float32 [n, t, H, E]. None where no kernel is."""
    kernels = prompt_kernels(rows)
    if kernels is None:
        return None
    flat = rows.contiguous()
    count, heads, dim = flat.shape[0] * flat.shape[1], flat.shape[2], flat.shape[3]
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    block = _BLOCK if dim <= 128 else _BLOCK // 2
    grid = (-(-count // block), heads)
    kernels.parts_kernel[grid](flat, parts, out, count, heads, D=dim, PARTS=_PARTS, BLOCK=block, num_warps=8)
    return out
