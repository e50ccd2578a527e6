"""Products of 16-bit numbers in float32 on tensor cores, which lose nothing that float32 would have kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def wide_products(source: Tensor) -> Iterator[None]:
    """While the block lasts, a GPU may use TF32 for products of float32 matrices whose numbers are those of ``source``.

    TF32 has 11 significant bits, as float16 has, and bfloat16 has 8, with float32's exponents in either: it holds the
    factors exactly, products are exact in any case, and sums are in float32. So only sources of 16 bits on a GPU
    change anything; it is several times as fast there.
    """
    if source.device.type != "cuda" or source.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
