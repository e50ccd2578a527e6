"""What a prompt's tokens receive of its queries: by a kernel of Triton where it is at hand, else by torch."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.received import received_near

_BLOCK = 64


def received_of(
    query: Tensor, keys: Tensor, sums: Tensor, scaling: float, lags: tuple[int, int], before: int
) -> Tensor:
    """What keys [n, H, D] receive of queries [q, Hq, D], the last of them and their own: float32 [1, H, n].

    sums [Hq, q]: logarithms of what softmax divides by; ``before`` keys come before the first query's own.
    """
    kernels = prompt_kernels(query)
    if kernels is None:
        padded = torch.nn.functional.pad(query.transpose(0, 1)[None], (0, 0, before, 0))
        paid = torch.nn.functional.pad(sums.float()[None], (before, 0), value=torch.inf)
        return received_near(padded, keys.transpose(0, 1)[None], paid, scaling, lags)
    assert query.stride(2) == keys.stride(2) == sums.stride(1) == 1
    count, heads, dim = keys.shape
    out = torch.empty(1, heads, count, dtype=torch.float32, device=keys.device)
    kernels.received_kernel[(-(-count // _BLOCK), heads)](
        query,
        keys,
        sums,
        out,
        query.shape[0],
        count,
        before,
        2 * scaling / math.log(2),
        *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), sums.stride(0), count),
        FIRST=lags[0],
        LAST=lags[1],
        GROUP=query.shape[1] // heads,
        D=dim,
        BLOCK=_BLOCK,
    )
    return out


def prompt_kernels(rows: Tensor) -> Any:
    """The kernels for such rows, whose products are exact in float32, or None where torch is to do without them."""
    sizes = rows.shape[-1] in (32, 64, 128, 256)
    return _module() if rows.is_cuda and sizes and rows.dtype in (torch.float16, torch.bfloat16) else None


@cache
def _module() -> Any:
    try:
        return import_module("aatc_cli.runtime.kernels.prompt_rows")
    except ImportError:
        return None
