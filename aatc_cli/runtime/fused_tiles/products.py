"""Products of bfloat16 rows with float32 matrices by matrix units: three products of parts, summed in float32.

A float32 number is the sum of three bfloat16 ones, each what the parts before it leave. So products of bfloat16 rows
with the parts are exact, and what is rounded is their sum, as in a float32 product.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 3


def by_parts_available(rows: Tensor) -> bool:
    """Whether this torch multiplies ``rows`` by parts: of bfloat16, on a GPU, from torch 2.8 on."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(torch.ops.aten.bmm, "dtype")


def parts_of(matrix: Tensor) -> Tensor:
    """The parts of matrices float32 [H, D, F] one below another, the smallest first: bfloat16 [H, 3 D, F]."""
    found, rest = [], matrix
    for _ in range(PARTS):
        found.append(rest.to(torch.bfloat16))
        rest = rest - found[-1].to(matrix.dtype)
    return torch.cat(found[::-1], 1)


def product(rows: Tensor, parts: Tensor) -> Tensor:
    """Rows bfloat16 [n, t, H, D] times the matrices of ``parts``: float32 [n, t, H, F], heads outermost in memory."""
    count, tokens, heads, _ = rows.shape
    by_head = rows.flatten(0, 1).transpose(0, 1)
    found = torch.bmm(torch.cat((by_head,) * PARTS, -1), parts, out_dtype=torch.float32)
    return found.view(heads, count, tokens, -1).permute(1, 2, 0, 3)
