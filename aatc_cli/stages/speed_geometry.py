"""eval --task speed of a profile alone: the fused kernels on a model of its shape with random contents, on a GPU."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Literal

import torch
from torch.nn.attention import SDPBackend

from aatc_cli.config import Geometry, Window
from aatc_cli.console import progress, say
from aatc_cli.errors import AatcError
from aatc_cli.evals.schema import write_evaluation
from aatc_cli.evals.speed import SpeedCheck, SpeedResult, SpeedRow
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.fused import FusedLayer, FusedSpec
from aatc_cli.runtime.kernels.bench import CHECK_BOUND, FusedBench, Timing, sdpa_timings
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper
from aatc_cli.runtime.kernels.model_bench import InPlaceState, decode_timing, full_state
from aatc_cli.runtime.kernels.synthetic import synthetic_encode, synthetic_tables
from aatc_cli.runtime.kernels.tables import fast_pairs
from aatc_cli.stages.files import Run
from aatc_cli.stages.subjects import EvalOptions, device_name
from aatc_cli.stages.versions import versions

# rotary base of Llama 3.1: it decides how many pairs are reconstructed
_THETA = 500_000.0
_WINDOW = Window(sinks=4, recent=128, flush=64)
# tokens a cache has room for beside those it is filled with
_ROOM = 64


def measure_geometry(
    run: Run, profile: ModelProfile, bits: float, sizes: list[tuple[int, int]], repeats: int, options: EvalOptions,
    *, whole: bool,
) -> SpeedResult:  # fmt: skip
    """Time one layer's decode attention, and with ``whole`` a model's decode step, at every (context, batch).

    The reference is the fastest attention torch has on a bfloat16 cache in place. Raises `AatcError` without a GPU or
    CuPy, or when the fused output is not the twin's: then nothing is written.
    """
    if not options.device.startswith("cuda") or not fused_available():
        raise AatcError("the fused kernels are timed on a CUDA device with CuPy", "give --device cuda, or name a model")
    device, geometry, began = torch.device(options.device), profile.geometry, time.perf_counter()
    rows: list[SpeedRow] = []
    checks: list[SpeedCheck] = []
    with progress("eval speed", len(sizes) * (1 + whole)) as ticker:
        for context, batch in sizes:
            bench = FusedBench.of(geometry, _WINDOW, bits, _THETA, batch, context, device)
            timing, error = bench.measure(repeats)
            if not error <= CHECK_BOUND:
                raise AatcError(
                    f"fused attention at {context} tokens is {error:.3g} from its twin, more than {CHECK_BOUND:g}; "
                    "no time is reported",
                    "report this with the device and the versions of torch and CuPy",
                )
            checks.append(SpeedCheck(context=context, batch=batch, backend="fused", error=error, bound=CHECK_BOUND))
            theirs = sdpa_timings(geometry, batch, context, repeats, device)
            rows += _rows("attention", context, batch, theirs, timing)
            ticker.advance()
        if whole:
            model = random_llama(geometry, profile.context, _THETA, device, torch.bfloat16)
            spec = synthetic_spec(geometry, bits, device)
            for context, batch in sizes:
                rows += _whole(model, spec, geometry, context, batch, repeats)
                ticker.advance()
    result = SpeedResult(
        recipe="synthetic", budget=f"{bits:g}", model=profile.name, bits=bits, seconds=time.perf_counter() - began,
        device=device_name(options.device), dtype="bfloat16", versions=versions(), synthetic=True, absolute=True,
        threads=torch.get_num_threads(), repeats=repeats, steps=1, rows=rows, checks=checks,
    )  # fmt: skip
    say(f"eval: speed of {profile.name} -> {write_evaluation(run.evals, result)}")
    return result


def synthetic_spec(geometry: Geometry, bits: float, device: torch.device) -> FusedSpec:
    """A fused cache's static part with random tables, a seed for every layer."""
    steps = torch.arange(0, geometry.head_dim, 2, device=device, dtype=torch.float64) / geometry.head_dim
    frequencies = _THETA**-steps
    layers = []
    for layer in range(geometry.layers):
        tables = synthetic_tables(geometry, bits, fast_pairs(frequencies), device, seed=layer, hopper=on_hopper(device))
        layers.append(FusedLayer({}, tables, synthetic_encode(tables, geometry, seed=layer)))
    return FusedSpec(
        tuple(layers), _WINDOW, torch.bfloat16, geometry.heads, geometry.kv_heads, geometry.head_dim,
        frequencies.to(torch.float32), geometry.head_dim**-0.5,
    )  # fmt: skip


def _whole(
    model: object, spec: FusedSpec, geometry: Geometry, context: int, batch: int, repeats: int
) -> list[SpeedRow]:
    fused = decode_timing(model, full_state(spec, batch, context, _ROOM), batch, repeats)
    # a hosted cache and its layers point at each other: only a collection frees its tensors
    gc.collect()
    torch.cuda.empty_cache()
    theirs: list[Timing] = []
    try:
        state = InPlaceState(geometry, batch, context, SDPBackend.FLASH_ATTENTION, spec.frequencies.to(torch.bfloat16))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            state.backend = backend
            theirs.append(decode_timing(model, state, batch, repeats))
    except torch.cuda.OutOfMemoryError:
        say(f"eval: the uncompressed cache of {batch} x {context} tokens does not fit this device")
    return _rows("decode", context, batch, theirs, fused)


def _rows(
    part: Literal["attention", "decode"], context: int, batch: int, theirs: list[Timing], ours: Timing
) -> list[SpeedRow]:
    """A row per backend; ratios are to the fastest of torch's, or to our own where none of them ran."""
    fastest = min(theirs, key=lambda timing: median(timing.seconds), default=ours)
    best = median(fastest.seconds)
    rows = []
    alone = part == "attention"
    for timing in [*theirs, ours]:
        middle, low, high = median(timing.seconds), min(timing.seconds), max(timing.seconds)
        rows.append(
            SpeedRow(
                part=part, context=context, batch=batch, backend=timing.backend, milliseconds=1e3 * middle,
                milliseconds_low=1e3 * low, milliseconds_high=1e3 * high, ratio=middle / best, ratio_low=low / best,
                ratio_high=high / best, bytes_moved=timing.bytes_moved,
                gigabytes_per_second=timing.bytes_moved / middle / 1e9 if alone else None,
                bound_milliseconds=1e3 * timing.bytes_moved / fastest.bytes_moved * best if alone else None,
            )
        )  # fmt: skip
    return rows
