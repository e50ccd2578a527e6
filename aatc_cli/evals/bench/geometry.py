"""aatc eval speed with a profile and no model: the caches of a geometry, with random contents, on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch

from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Geometry, Window
from aatc_cli.console import progress, say
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import CHECK_BOUND, FusedBench, Timing, sdpa_timings
from aatc_cli.evals.bench.float8_trials import BACKEND as FLOAT8
from aatc_cli.evals.bench.float8_trials import FLOAT8_BOUND, float8_timing
from aatc_cli.evals.bench.packed import PACKED_BOUND, PackedBench
from aatc_cli.evals.bench.peers import peer_timings
from aatc_cli.evals.bench.rates import device_rates
from aatc_cli.evals.bench.roofline import DeviceRates, Roofline, TileWork
from aatc_cli.evals.bench.whole_model import fused_steps, synthetic_spec, uncompressed_steps
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.result import SpeedCheck, SpeedMemory, SpeedRates, SpeedRow
from aatc_cli.evals.subjects import EvalOptions, device_name
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.kernels.launch import fused_available

# rotary base of Llama 3.1: it decides how many pairs are reconstructed
_THETA = 500_000.0
_FUSED_WINDOW = Window(sinks=4, recent=128, flush=64)
_PACKED_WINDOW = Window()

Size = tuple[int, int]
Part = Literal["attention", "decode"]


@dataclass(frozen=True)
class Ours:
    """Times of our attention at one size, its error to the twin and what that may be, and what its work takes alone."""

    timing: Timing
    error: float
    bound: float
    roof: Roofline | None = None


@dataclass
class Findings:
    """What a result is made of."""

    rows: list[SpeedRow] = field(default_factory=list)
    checks: list[SpeedCheck] = field(default_factory=list)
    memory: list[SpeedMemory] = field(default_factory=list)
    configurations: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def measure_geometry(
    profile: ModelProfile,
    bits: float,
    sizes: list[Size],
    repeats: int,
    options: EvalOptions,
    *,
    whole: bool,
    groups: int | None = None,
) -> SpeedResult:
    """Time one layer's decode attention, and with ``whole`` a model's decode step, at every (context, batch).

    The cache is the fused one, or with ``groups`` the packed one with as many head groups on each side. The reference
    is the fastest attention on a bfloat16 cache in place. Raises `AatcError` without a GPU (or, for the fused cache,
    CuPy), or when the output is not the twin's.
    """
    _check_device(options.device, groups)
    device, geometry, began = torch.device(options.device), profile.geometry, time.perf_counter()
    found, rates = Findings(), device_rates(device) if groups is None else None
    with progress("eval speed", len(sizes) * (1 + 2 * whole)) as ticker:
        for size in sizes:
            if groups is None:
                ours = _fused(geometry, bits, size, repeats, device, rates)
            else:
                ours = _packed(geometry, groups, bits, size, repeats, device)
            _attention(found, ours, geometry, size, repeats, device)
            ticker.advance()
        if whole:
            _whole(found, profile, bits, sizes, repeats, device, ticker.advance)
    for place, reason in found.left_out.items():
        say(f"eval: {place} is left out: {reason}")
    return SpeedResult(
        recipe="synthetic" if groups is None else f"synthetic-groups-{groups}",
        budget=f"{bits:g}",
        model=profile.name,
        bits=bits,
        seconds=time.perf_counter() - began,
        device=device_name(options.device),
        dtype="bfloat16",
        versions=versions(),
        synthetic=True,
        absolute=True,
        threads=torch.get_num_threads(),
        repeats=repeats,
        steps=1,
        rows=found.rows,
        checks=found.checks,
        groups=groups,
        rates=_rates(rates),
        memory=found.memory,
        configurations=found.configurations,
        left_out=found.left_out,
    )


def _check_device(device: str, groups: int | None) -> None:
    """Raise `AatcError` where the cache of these head groups cannot be timed."""
    if not device.startswith("cuda"):
        raise AatcError("a geometry is timed on a CUDA device", "give --device cuda, or name a model")
    if groups is None and not fused_available():
        raise AatcError(
            "the fused kernels are timed on a CUDA device with CuPy", "pip install 'aatc[cuda]', or give --groups all"
        )


def _rates(rates: DeviceRates | None) -> SpeedRates | None:
    if rates is None:
        return None
    return SpeedRates(
        read_bytes=rates.bytes, integer_instructions=rates.instructions, float8_multiply_adds=rates.multiply_adds
    )


def _fused(
    geometry: Geometry, bits: float, size: Size, repeats: int, device: torch.device, rates: DeviceRates | None
) -> Ours:
    context, batch = size
    bench = FusedBench.of(geometry, _FUSED_WINDOW, bits, _THETA, batch, context, device)
    timing, error = bench.measure(repeats)
    roof = None
    if rates is not None:
        roof = Roofline.of(TileWork.of(bench.tables), batch * bench.tiles, timing.bytes_moved, rates)
    return Ours(timing, error, CHECK_BOUND, roof)


def _packed(geometry: Geometry, groups: int, bits: float, size: Size, repeats: int, device: torch.device) -> Ours:
    context, batch = size
    bench = PackedBench.of(geometry, _PACKED_WINDOW, groups, bits, _THETA, batch, context, device)
    return Ours(*bench.measure(repeats), PACKED_BOUND)


def _attention(found: Findings, ours: Ours, geometry: Geometry, size: Size, repeats: int, device: torch.device) -> None:
    """Rows of one size: the references, the float8 baseline and ours; raises `AatcError` where ours is wrong."""
    context, batch = size
    name = ours.timing.backend
    if not ours.error <= ours.bound:
        raise AatcError(
            f"{name} attention at {context} tokens is {ours.error:.3g} from its twin, more than {ours.bound:g}; "
            "no time is reported",
            "report this with the device and the versions of torch and CuPy",
        )
    torch.cuda.empty_cache()
    checks = [(name, ours.error, ours.bound)]
    peers, missing = peer_timings(geometry, batch, context, repeats, device)
    references = [*sdpa_timings(geometry, batch, context, repeats, device), *peers]
    float8 = float8_timing(geometry, batch, context, repeats, device)
    others = []
    if isinstance(float8, str):
        missing[FLOAT8] = float8
    else:
        timing, error, launched = float8
        others.append(timing)
        checks.append((FLOAT8, error, FLOAT8_BOUND))
        found.configurations[place_of(FLOAT8, size)] = launched
    found.left_out |= {place_of(backend, size): reason for backend, reason in missing.items()}
    found.checks += [
        SpeedCheck(context=context, batch=batch, backend=backend, error=error, bound=bound)
        for backend, error, bound in checks
    ]
    found.rows += speed_rows("attention", size, references, [*others, ours.timing], ours.roof)


def place_of(backend: str, size: Size) -> str:
    """A backend at one (context, batch), for people."""
    return f"{backend} at {size[1]} x {size[0]}"


def _whole(
    found: Findings,
    profile: ModelProfile,
    bits: float,
    sizes: list[Size],
    repeats: int,
    device: torch.device,
    advance: Callable[[], None],
) -> None:
    """Decode steps of all sizes; the uncompressed ones first, while no table of the fused cache takes memory."""
    geometry, dtype = profile.geometry, torch.bfloat16
    model = random_llama(geometry, profile.context, _THETA, device, dtype)
    theirs = []
    for context, batch in sizes:
        theirs.append(uncompressed_steps(model, geometry, context, batch, repeats, device))
        advance()
    spec = synthetic_spec(geometry, _FUSED_WINDOW, bits, _THETA, device, dtype)
    for size, (timings, memory) in zip(sizes, theirs, strict=True):
        ours, mine = fused_steps(model, spec, geometry, *size, repeats)
        found.rows += speed_rows("decode", size, timings, [ours])
        found.memory += [*memory, mine]
        advance()


def speed_rows(
    part: Part, size: Size, references: Sequence[Timing], others: Sequence[Timing], roof: Roofline | None = None
) -> list[SpeedRow]:
    """A row per backend, ours last with the ``roof``; ratios are to the fastest reference, or to ours without any."""
    fastest = min(references, key=lambda timing: median(timing.seconds), default=others[-1])
    best = median(fastest.seconds)
    rows = []
    alone = part == "attention"
    for timing in [*references, *others]:
        middle, low, high = median(timing.seconds), min(timing.seconds), max(timing.seconds)
        mine = roof if timing is others[-1] else None
        rows.append(
            SpeedRow(
                part=part,
                context=size[0],
                batch=size[1],
                backend=timing.backend,
                milliseconds=1e3 * middle,
                milliseconds_low=1e3 * low,
                milliseconds_high=1e3 * high,
                ratio=middle / best,
                ratio_low=low / best,
                ratio_high=high / best,
                bytes_moved=timing.bytes_moved,
                gigabytes_per_second=timing.bytes_moved / middle / 1e9 if alone else None,
                bound_milliseconds=1e3 * timing.bytes_moved / fastest.bytes_moved * best if alone else None,
                roof_bytes_milliseconds=1e3 * mine.bytes if mine else None,
                roof_unpack_milliseconds=1e3 * mine.unpack if mine else None,
                roof_keys_milliseconds=1e3 * mine.keys if mine else None,
            )
        )
    return rows
