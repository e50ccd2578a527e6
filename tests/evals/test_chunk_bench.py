"""The bench of stored chunks on a CPU, where it measures the torch code itself."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.evals.bench.chunks import Form, codec_of, measure, random_pages
from aatc_cli.runtime.stored.host import with_threads
from aatc_cli.runtime.stored.host_decode import host_available

GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=128)


@pytest.mark.parametrize("form", [Form(1, (32, 16, 16), 2.0), Form(2, (64,), 3.0)])
def test_bytes_are_those_of_the_form_and_pages_are_those_of_the_code(monkeypatch, form):
    monkeypatch.setattr("aatc_cli.runtime.stored.host.host_available", lambda: False)
    found = measure(GEOMETRY, form, 512, "cpu")
    assert found["raw_bytes"] == 2 * 2 * 2 * 512 * 64
    # a scale of 8 bits for 32 or 64 numbers, planes that are part empty, heads and sinks of a short prefix
    assert 0.6 * 16 / form.bits < found["raw_bytes"] / found["coded_bytes"] < 16 / form.bits
    assert found["bytes_changed"] == 0
    assert found["error_k"] == found["error_v"] == 0
    assert "decode_seconds" not in found


@pytest.mark.skipif(not host_available(), reason="numba is not installed")
def test_heads_of_64_are_read_as_the_code_reads_them():
    """Where a machine multiplies in bfloat16, pages of that type are made so: twice its rounding, and no more."""
    geometry = Geometry(layers=2, heads=2, kv_heads=2, head_dim=64, hidden_size=128)
    plain = codec_of(geometry, Form(1, (32, 16, 16), 2.0), "cpu")
    fast, pages = with_threads(plain, 2), random_pages(geometry, 512, "cpu")
    chunks = fast.encode_run(pages, 256)
    slow = plain.encode_run(pages, 256)
    assert sum(a != b for one, other in zip(chunks, slow, strict=True) for a, b in zip(one, other, strict=True)) < 2000
    wanted = plain.decode_run(chunks, 256, torch.float32)
    for dtype, most in ((torch.float32, 1e-6), (torch.float16, 3e-4), (torch.bfloat16, 4e-3)):
        got = fast.decode_run(chunks, 256, dtype)
        for side in SIDES:
            error = (got.of(side).float() - wanted.of(side)).norm() / wanted.of(side).norm()
            assert float(error) < most, (dtype, side)
