"""Time of the float8 baseline: every configuration is tried in a process of its own and must agree with the twin.

A kernel compiler may make a program that reads where it must not, after which nothing runs in that process any more.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.evals.bench.attention import Timing, copies_of, graph_seconds
from aatc_cli.evals.bench.float8 import (
    Float8Cache,
    Float8Config,
    Float8Decoder,
    float8_attention,
    float8_configs,
    rounded_query,
    triton_missing,
)

BACKEND = "float8-triton"
# what rounding the weights and one operand to 16 bits leaves, relative root mean square of the output
FLOAT8_BOUND = 0.01
_TRIAL_REPEATS = 5
# seconds that compiling and running one configuration may take
_PATIENCE = 120.0


@dataclass
class Float8Case:
    """Random caches of one shape, cycled through so that none is in the last-level cache, and a query [B, Hq, D]."""

    geometry: Geometry
    batch: int
    context: int
    caches: list[Float8Cache]
    query: Tensor
    lengths: Tensor
    expected: dict[bool, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, geometry: Geometry, batch: int, context: int, device: torch.device) -> Float8Case:
        """Normal keys and values from seed 0, all sequences full."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (batch, geometry.kv_heads, context, geometry.head_dim)
        first = Float8Cache.random(shape, device, generator)
        caches = [first, *(first.copy() for _ in range(copies_of(first.nbytes) - 1))]
        query = torch.randn(batch, geometry.heads, geometry.head_dim, device=device, generator=generator)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        return cls(geometry, batch, context, caches, query.to(torch.bfloat16), lengths)

    def decoder(self, config: Float8Config) -> Float8Decoder:
        """The kernels of a configuration for these caches."""
        g, device = self.geometry, self.query.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        return Float8Decoder(
            self.batch, g.kv_heads, g.heads // g.kv_heads, g.head_dim, self.context, config, processors, device
        )

    def error(self, decoder: Float8Decoder) -> float:
        """Relative error of the first and the last sequence to the twin, which reads what the kernel reads."""
        rounded = decoder.config.operands == "float8"
        ends, scaling = slice(0, None, max(1, self.batch - 1)), self.geometry.head_dim**-0.5
        if rounded not in self.expected:
            query = rounded_query(self.query[ends]) if rounded else self.query[ends]
            self.expected[rounded] = float8_attention(query, self.caches[0][ends], self.lengths[ends], scaling)
        out = torch.full_like(self.query, torch.nan)
        decoder(self.query, self.caches[0], self.lengths, scaling, out)
        expected = self.expected[rounded]
        return float((out[ends] - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    def seconds(self, decoder: Float8Decoder, repeats: int) -> list[float]:
        """Seconds per call, captured and replayed."""
        out, scaling = torch.empty_like(self.query), self.geometry.head_dim**-0.5

        def call() -> int:
            for cache in self.caches:
                decoder(self.query, cache, self.lengths, scaling, out)
            return len(self.caches)

        return graph_seconds(call, repeats)


@dataclass(frozen=True)
class Trial:
    """Median seconds per call of a configuration and its error, or why it has none."""

    seconds: float
    error: float
    reason: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it may be chosen."""
        return self.reason is None and self.error <= FLOAT8_BOUND


class TrialProcess:
    """Tries configurations one after another in a process of its own; after one that breaks it, in a fresh one."""

    def __init__(self, geometry: Geometry, batch: int, context: int, device: torch.device) -> None:
        self._shape = (geometry, batch, context, device)
        self._process: Any = None

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def run(self, config: Float8Config, patience: float = _PATIENCE) -> Trial:
        """One trial; a configuration that takes longer than ``patience`` seconds, or ends the process, has failed."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, *self._shape), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(config)
            if not self._pipe.poll(patience):
                raise TimeoutError(f"no result in {patience:g} seconds")
            trial, alive = self._pipe.recv()
        except (EOFError, OSError) as error:
            trial, alive = Trial(0.0, float("inf"), str(error) or "the process ended"), False
        if not alive:
            self._stop()
        found: Trial = trial
        return found

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Any, geometry: Geometry, batch: int, context: int, device: torch.device) -> None:
    """Answer configurations from ``pipe`` with a `Trial` and whether this process can go on."""
    case: Float8Case | None = None
    while True:
        try:
            config = pipe.recv()
        except EOFError:
            return
        try:
            case = case or Float8Case.of(geometry, batch, context, device)
            decoder = case.decoder(config)
            error = case.error(decoder)
            trial = Trial(median(case.seconds(decoder, _TRIAL_REPEATS)), error)
        # whatever a compiler or a driver may say is the reason; it belongs to this configuration alone
        except Exception as problem:
            trial = Trial(
                0.0, float("inf"), f"{type(problem).__name__}: {next(iter(str(problem).strip().splitlines()), '')}"
            )
        pipe.send((trial, _alive(device)))


def _alive(device: torch.device) -> bool:
    """Whether the device still answers this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def best_config(trials: Iterable[tuple[Float8Config, Trial]]) -> tuple[Float8Config | None, str]:
    """The fastest configuration that agrees with the twin; else None and why the last one failed."""
    trials = list(trials)
    passed = [(trial.seconds, place) for place, (_, trial) in enumerate(trials) if trial.passed]
    if passed:
        return trials[min(passed)[1]][0], ""
    config, last = trials[-1]
    why = last.reason or f"its error is {last.error:.3g}, more than {FLOAT8_BOUND:g}"
    return None, f"none of {len(trials)} configurations agrees with the twin; {config.name}: {why}"


def float8_timing(
    geometry: Geometry, batch: int, context: int, repeats: int, device: torch.device
) -> tuple[Timing, float, str] | str:
    """Times of the float8 baseline, its error to the twin and the configuration chosen; or why there are none."""
    if reason := triton_missing():
        return reason
    with TrialProcess(geometry, batch, context, device) as process:
        config, reason = best_config([(config, process.run(config)) for config in float8_configs()])
    if config is None:
        return reason
    case = Float8Case.of(geometry, batch, context, device)
    decoder = case.decoder(config)
    error = case.error(decoder)
    if not error <= FLOAT8_BOUND:
        return f"its error is {error:.3g}, more than {FLOAT8_BOUND:g}"
    moved = case.caches[0].nbytes
    return Timing(BACKEND, case.seconds(decoder, repeats), moved), error, config.name
