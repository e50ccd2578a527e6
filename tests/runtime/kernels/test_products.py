"""Float32 matrices in bfloat16 parts: nothing is lost, and products are those of the whole ones."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.runtime.fused_tiles import products
from aatc_cli.runtime.fused_tiles.products import by_parts_available, parts_of, product


def test_parts_are_the_matrix_and_products_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 16, 16, generator=generator) * torch.logspace(-6, 6, 16)
    parts = parts_of(matrix)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().view(3, 3, 16, 16).sum(1), matrix.double())
    rows = torch.randn(5, 4, 3, 16, generator=generator).to(torch.bfloat16)
    assert not by_parts_available(rows)

    def bmm(one: torch.Tensor, other: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return (one.double() @ other.double()).to(out_dtype)

    monkeypatch.setattr(products.torch, "bmm", bmm)
    found = product(rows, parts)
    expected = torch.einsum("nthe,hef->nthf", rows.double(), matrix.double())
    assert found.shape == (5, 4, 3, 16)
    assert (found - expected).abs().max() <= 2.0**-24 * expected.abs().max()
    # as a kernel takes it: heads and tokens anywhere, a row of a head in one piece
    assert found.stride(3) == 1
    assert found.stride(0) == 4 * found.stride(1)
