"""Keys of a prompt turned back, by a kernel of Triton where it is at hand, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.runtime.kernels.received_rows import prompt_kernels
from aatc_cli.serve.vllm_backend.turning import taken_off

_ROWS = 32


def plain_keys(keys: Tensor, back: tuple[Tensor, Tensor]) -> Tensor:
    """`taken_off`: rotated keys [n, H, D] as they were before. -> [n, C]."""
    kernels = prompt_kernels(keys)
    if kernels is None:
        return taken_off(keys, back)
    assert keys.stride(2) == 1
    assert back[0].is_contiguous()
    assert back[1].is_contiguous()
    count, heads, dim = keys.shape
    out = torch.empty(count, heads * dim, dtype=keys.dtype, device=keys.device)
    strides = keys.stride(0), keys.stride(1)
    kernels.back_kernel[(-(-count // _ROWS), heads)](keys, *back, out, count, *strides, heads, D=dim, BLOCK=_ROWS)
    return out
