"""The float8 baseline on a CPU: its twin, its kernel under Triton's interpreter, and how a configuration is chosen."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench import float8
from aatc_cli.evals.bench.float8 import (
    Float8Cache,
    Float8Config,
    Float8Decoder,
    float8_attention,
    float8_configs,
    rounded_query,
    triton_missing,
)
from aatc_cli.evals.bench.float8_trials import FLOAT8_BOUND, Trial, TrialProcess, best_config, float8_timing

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, heads=6, kv_heads=2, head_dim=8, hidden_size=48)


def cache_of(*shape: int, seed: int = 0) -> Float8Cache:
    return Float8Cache.random(shape, CPU, torch.Generator().manual_seed(seed))


def test_twin_is_softmax_attention_over_the_rounded_cache() -> None:
    cache, lengths = cache_of(3, 2, 40, 8), [40, 1, 23]
    query = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    keys, values = (
        side.to(torch.float64) * scale.to(torch.float64)[..., None, None]
        for side, scale in ((cache.keys, cache.key_scale), (cache.values, cache.value_scale))
    )
    got = float8_attention(query, cache, torch.tensor(lengths, dtype=torch.int32), 0.4)
    for row, length in enumerate(lengths):
        mine = query[row].to(torch.float64)[None, :, None]
        plain = F.scaled_dot_product_attention(
            mine, keys[row : row + 1, :, :length], values[row : row + 1, :, :length], scale=0.4, enable_gqa=True
        )
        torch.testing.assert_close(got[row], plain[0, :, 0], rtol=1e-10, atol=1e-12)


def test_numbers_are_within_half_a_step_of_e4m3() -> None:
    """Three mantissa bits: half a step is a sixteenth of a number, or half of 2^-9 below the normal range."""
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(2, 3, 50, 8, generator=generator) * 7 for _ in range(2))
    cache = Float8Cache.of(keys, values)
    for side, held, scale in ((keys, cache.keys, cache.key_scale), (values, cache.values, cache.value_scale)):
        numbers = side / scale[..., None, None]
        off = (held.to(torch.float32) - numbers).abs()
        assert float(held.to(torch.float32).abs().amax()) == 448
        assert bool((off <= (numbers.abs() / 16).clamp_min(2.0**-10) * (1 + 1e-5)).all())
        assert float(off.max()) > 1
    assert cache.nbytes == 2 * 2 * 3 * (50 * 8 + 4)


def test_a_query_is_rounded_against_its_own_largest_number() -> None:
    query = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    got = rounded_query(query * torch.tensor([1.0, 1e-3])[:, None, None])
    torch.testing.assert_close(got[1], rounded_query(query)[1] * 1e-3, rtol=1e-6, atol=0)
    off = (got[0] - query[0]).abs() / query[0].abs().amax(-1, keepdim=True)
    assert 0.005 < float(off.max()) <= 1 / 16


INTERPRETED = """
import torch
from aatc_cli.evals.bench.float8 import *

def run(batch, kv_heads, group, dim, capacity, lengths, operands, tokens_first, block, processors):
    generator = torch.Generator().manual_seed(capacity)
    cache = Float8Cache.random((batch, kv_heads, capacity, dim), torch.device("cpu"), generator)
    # the interpreter cuts where the hardware rounds: numbers of e4m3 whose largest is 448 are exact either way
    query = (torch.randn(batch, kv_heads * group, dim, generator=generator) * 40).to(torch.float8_e4m3fn).float()
    query[..., 0] = 448
    query = (query / 128).to(torch.bfloat16)
    assert torch.equal(rounded_query(query).float(), query.float())
    config = Float8Config(operands, tokens_first, block, 4, 1, 2)
    decoder = Float8Decoder(batch, kv_heads, group, dim, capacity, config, processors, torch.device("cpu"))
    count, scaling = torch.tensor(lengths, dtype=torch.int32), dim**-0.5
    out = torch.full(query.shape, torch.nan)
    decoder(query, cache, count, scaling, out)
    expected = float8_attention(query, cache, count, scaling)
    error = float((out - expected).norm() / expected.norm())
    print(decoder.splits, error)
    assert error < 1e-3, error

for operands, tokens_first in (("float16", False), ("float8", False), ("float8", True), ("float16", True)):
    run(2, 2, 4, 128, 300, [300, 65], operands, tokens_first, 64, 8)
    run(1, 1, 1, 64, 64, [50], operands, tokens_first, 64, 1)
    run(1, 2, 3, 96, 257, [257], operands, tokens_first, 128, 4)
    run(2, 1, 20, 256, 129, [1, 129], operands, tokens_first, 64, 40)
"""


def interpreter_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        int(np.ones(1))  # type: ignore[call-overload]
    except TypeError:
        return "Triton's interpreter needs a numpy that turns arrays of one number into numbers"
    return None


@pytest.mark.skipif(interpreter_missing() is not None, reason=str(interpreter_missing()))
def test_kernel_is_its_twin_under_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    splits = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(splits) == 16
    assert set(splits) == {1, 3}


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    float8._kernels.cache_clear()


@pytest.mark.usefixtures("no_triton")
def test_without_triton_the_reason_is_given() -> None:
    assert "Triton is not installed" in str(triton_missing())
    assert float8_timing(GEOMETRY, 1, 64, 2, CPU) == triton_missing()
    with pytest.raises(AatcError, match="Triton is not installed"):
        Float8Decoder(1, 2, 3, 8, 64, next(float8_configs()), 4, CPU)


def test_configurations_differ_and_have_both_kinds_of_products() -> None:
    configs = list(float8_configs())
    assert len(set(configs)) == len(configs) == len({config.name for config in configs})
    assert {(c.operands, c.tokens_first) for c in configs} == {
        ("float16", False),
        ("bfloat16", False),
        ("float8", False),
        ("float8", True),
        ("float16", True),
    }


def test_the_fastest_that_agrees_with_the_twin_wins() -> None:
    a, b, c, d = list(float8_configs())[:4]
    wrong, broken = Trial(1.0, 2 * FLOAT8_BOUND), Trial(0.0, float("inf"), "no room")
    assert best_config([(a, wrong), (b, Trial(3.0, 0.0)), (c, Trial(2.0, FLOAT8_BOUND)), (d, broken)]) == (c, "")
    config, reason = best_config([(a, broken), (b, wrong)])
    assert config is None
    assert reason.endswith(f"{b.name}: its error is 0.02, more than 0.01")
    assert best_config([(b, wrong), (a, broken)])[1].endswith(f"{a.name}: no room")
    assert best_config([(a, Trial(1.0, float("nan")))])[0] is None


def test_a_configuration_that_fails_or_hangs_costs_only_itself() -> None:
    """Without a GPU every one fails; the process goes on after an exception and is made anew after silence."""
    config = Float8Config("float16", False, 64, 4, 1, 2)
    with TrialProcess(GEOMETRY, 1, 64, CPU) as process:
        assert "0 seconds" in str(process.run(config, patience=0).reason)
        assert process._process is None
        first = process.run(config)
        kept = process._process.pid
        second = process.run(config)
        assert process._process.pid == kept
    assert process._process is None
    for trial in (first, second):
        assert not trial.passed
        assert trial.reason is not None
        assert "seconds" not in trial.reason
