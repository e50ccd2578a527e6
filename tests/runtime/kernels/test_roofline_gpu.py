"""Roofs and the packed cache on a CUDA device: no call is faster than what it has to do, and both are right."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.evals.bench.attention import CHECK_BOUND, FusedBench
from aatc_cli.evals.bench.packed import PACKED_BOUND, PackedBench
from aatc_cli.evals.bench.rates import device_rates
from aatc_cli.evals.bench.roofline import Roofline, TileWork
from aatc_cli.runtime.kernels.launch import fused_available

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not fused_available(), reason="needs a CUDA device and CuPy")]

GEOMETRY = Geometry(layers=1, heads=32, kv_heads=8, head_dim=128, hidden_size=4096)


def test_no_call_is_faster_than_its_roofs() -> None:
    device = torch.device("cuda")
    rates = device_rates(device)
    if rates is None:
        pytest.skip("this device has no products of 8-bit floats")
    window = Window(sinks=4, recent=128, flush=64)
    bench = FusedBench.of(GEOMETRY, window, 2.0, 5e5, 4, 16384, device)
    timing, error = bench.measure(3)
    assert error < CHECK_BOUND
    roof = Roofline.of(TileWork.of(bench.tables), bench.batch * bench.tiles, timing.bytes_moved, rates)
    took = median(timing.seconds)
    assert 0 < roof.unpack < took
    assert 0 < roof.keys < took
    assert 0 < roof.bytes < took


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_cache_of_all_heads_is_its_codes(groups: int) -> None:
    bench = PackedBench.of(GEOMETRY, Window(), groups, 2.0, 5e5, 3, 5000, torch.device("cuda"))
    timing, error = bench.measure(2)
    assert error < PACKED_BOUND
    assert all(seconds > 0 for seconds in timing.seconds)
