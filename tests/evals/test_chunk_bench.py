"""The bench of stored chunks on a CPU, where it measures the torch code itself."""

from __future__ import annotations

import pytest

from aatc_cli.config import Geometry
from aatc_cli.evals.bench.chunks import Form, measure

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
