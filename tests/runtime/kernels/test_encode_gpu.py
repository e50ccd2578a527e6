"""Tiles that a kernel packs on a GPU: the codes of torch on the same device, but for scales that are equally good."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.core.attend import attention_with_sums
from aatc_cli.core.received import received_by_head, received_near
from aatc_cli.evals.bench.packing import packing_layers
from aatc_cli.evals.bench.tile_plan import RULE
from aatc_cli.evals.bench.undecided import undecided
from aatc_cli.runtime.kernels.launch import fused_available
from aatc_cli.runtime.kernels.received_rows import received_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not fused_available(), reason="needs a CUDA device of compute capability 8 and CuPy"),
]


@pytest.mark.parametrize(("heads", "dim", "bits"), [(8, 128, 2.0), (3, 64, 3.0), (1, 256, 1.5), (2, 80, 4.0)])
@torch.no_grad()
def test_codes_are_those_of_torch(heads: int, dim: int, bits: float) -> None:
    device = torch.device("cuda")
    geometry = Geometry(layers=1, heads=heads, kv_heads=heads, head_dim=dim, hidden_size=heads * dim)
    layers, held = packing_layers(geometry, bits, device)
    generator = torch.Generator(device).manual_seed(2)
    rows: Any = {
        side: torch.randn(2, 2048, heads * dim, device=device, dtype=torch.bfloat16, generator=generator)
        for side in SIDES
    }
    received = torch.rand(2, RULE.orders(heads), 2048, device=device, generator=generator)
    count, apart = undecided(held, rows, *(layer.encode(rows, received, 0) for layer in layers))
    print(f"{count} of {4 * 2048 * heads} tokens of a head and side differ, by {apart:.3g} of what roundings move")
    assert apart <= 1.0


@pytest.mark.parametrize("size", [64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_prompt_is_ranked_by_the_sums_of_the_fused_kernel(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, 700, size, device="cuda", dtype=dtype, generator=generator) for heads in (6, 2, 2)
    )
    found = attention_with_sums(query, keys, values, 0.125)
    assert found is not None
    whole = received_by_head(query.double(), keys.double(), 0.125, (32, 64))
    near = received_near(query, keys, found[1], 0.125, (32, 64))
    by_kernel = [
        received_of(q.transpose(0, 1), k.transpose(0, 1), sums.float(), 0.125, (32, 64), 0)
        for q, k, sums in zip(query, keys, found[1], strict=True)
    ]
    for received in (near, torch.cat(by_kernel)):
        off = received - whole
        assert off.abs().max() < (1e-5 if dtype == torch.float32 else 1e-3) * whole.max()
