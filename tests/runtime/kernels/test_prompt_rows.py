"""The Triton kernels of prompts in engines against torch, under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from aatc_cli.runtime.kernels import received_rows
from aatc_cli.serve.vllm_backend import quick

def run(count, keys, heads, group, dim, lags, dtype):
    generator = torch.Generator().manual_seed(count)
    query = torch.randn(count, heads * group, dim, generator=generator).to(dtype)
    # rows of a product that has keys and values too
    rows = torch.randn(keys, 2 * heads * dim, generator=generator).to(dtype)[:, : heads * dim].view(keys, heads, dim)
    sums = torch.randn(heads * group, count, generator=generator) + 3
    back = tuple(torch.randn(2, keys, dim, generator=generator))
    received_rows.prompt_kernels = quick.prompt_kernels = lambda rows: None
    wanted = received_rows.received_of(query, rows, sums, 0.3, lags, keys - count), quick.plain_keys(rows, back)
    received_rows.prompt_kernels = quick.prompt_kernels = lambda rows: received_rows._module()
    found = received_rows.received_of(query, rows, sums, 0.3, lags, keys - count), quick.plain_keys(rows, back)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(found[1], wanted[1])

run(1, 1, 2, 2, 64, (1, 64), torch.float16)
run(150, 150, 2, 3, 64, (1, 64), torch.float16)
run(70, 131, 1, 4, 128, (32, 64), torch.float16)
run(200, 203, 2, 1, 32, (3, 150), torch.float16)

def multiplied(count, heads, dim):
    # float16 stands for bfloat16, which the interpreter multiplies as integers
    rows, parts = torch.randn(2, count, heads, dim).half(), torch.randn(3, heads, dim, dim).half()
    found = torch.full(rows.shape, torch.nan)
    kernels = received_rows._module()
    kernels.parts_kernel[(-(-2 * count // 64), heads)](rows, parts, found, 2 * count, heads, D=dim, PARTS=3, BLOCK=64)
    wanted = torch.einsum("nthe,phef->nthf", rows.double(), parts.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)

multiplied(50, 3, 64)
multiplied(64, 1, 128)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_are_torch_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
