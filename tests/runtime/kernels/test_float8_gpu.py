"""The float8 baseline on a CUDA device: every configuration against the twin, at odd sizes, captured and not."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.evals.bench.float8 import (
    Float8Cache,
    Float8Config,
    Float8Decoder,
    float8_attention,
    float8_configs,
    rounded_query,
    triton_missing,
)
from aatc_cli.evals.bench.float8_trials import BACKEND, FLOAT8_BOUND, TrialProcess, float8_timing

REASON = triton_missing() or "needs a CUDA device that multiplies 8-bit floats"
READY = triton_missing() is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason=REASON)]

# batch, kv heads, queries of each, dimensions, capacity, lengths
SHAPES = [
    (2, 8, 4, 128, 3000, (3000, 65)),
    (1, 1, 1, 64, 100, (100,)),
    (3, 2, 8, 128, 4099, (1, 4099, 2048)),
    (1, 3, 3, 96, 700, (700,)),
    (1, 2, 20, 256, 1500, (1500,)),
]


def geometry(kv_heads: int, group: int, dim: int) -> Geometry:
    heads = kv_heads * group
    return Geometry(layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim, hidden_size=heads * dim)


def test_every_configuration_is_its_twin() -> None:
    """In a process of its own: one that reads where it must not would take the other tests with it."""
    with TrialProcess(geometry(8, 4, 128), 2, 3001, torch.device("cuda")) as process:
        trials = {config.name: process.run(config) for config in float8_configs()}
    assert {name: trial for name, trial in trials.items() if not trial.passed} == {}
    assert all(trial.seconds > 0 for trial in trials.values())


@pytest.mark.parametrize(("batch", "kv_heads", "group", "dim", "capacity", "lengths"), SHAPES)
@pytest.mark.parametrize(
    "config",
    [Float8Config("float16", False, 64, 4, 3, 2), Float8Config("float8", True, 64, 4, 3, 2)],
    ids=lambda config: config.name,
)
def test_odd_sizes_captured_and_not(
    config: Float8Config, batch: int, kv_heads: int, group: int, dim: int, capacity: int, lengths: tuple[int, ...]
) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    cache = Float8Cache.random((batch, kv_heads, capacity, dim), device, generator)
    query = torch.randn(batch, kv_heads * group, dim, device=device, generator=generator).to(torch.bfloat16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    decoder = Float8Decoder(batch, kv_heads, group, dim, capacity, config, processors, device)
    count = torch.tensor(lengths, dtype=torch.int32, device=device)
    seen = rounded_query(query) if config.operands == "float8" else query
    out = torch.full_like(query, torch.nan)

    def error() -> float:
        expected = float8_attention(seen, cache, count, dim**-0.5)
        return float((out - expected).norm() / expected.norm())

    decoder(query, cache, count, dim**-0.5, out)
    assert error() <= FLOAT8_BOUND
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder(query, cache, count, dim**-0.5, out)
    # lengths are read on the device: the same graph serves others
    count.copy_((count + 1) // 2)
    graph.replay()
    torch.cuda.synchronize()
    assert error() <= FLOAT8_BOUND


def test_it_is_timed() -> None:
    found = float8_timing(geometry(8, 4, 128), 2, 4096, 3, torch.device("cuda"))
    assert not isinstance(found, str), found
    timing, error, name = found
    assert timing.backend == BACKEND
    assert timing.bytes_moved == 2 * 2 * 8 * (4096 * 128 + 4)
    assert len(timing.seconds) == 3
    assert error <= FLOAT8_BOUND
    assert name in {config.name for config in float8_configs()}
