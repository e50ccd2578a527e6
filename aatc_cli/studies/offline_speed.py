"""aatc eval offline-speed: collect and whiten of a geometry, with random weights and random text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.artifacts.transform import WhitenSettings
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Geometry, Window
from aatc_cli.console import say
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals import Task
from aatc_cli.evals.call import Call
from aatc_cli.evals.keeping import already
from aatc_cli.evals.offline_speed.settings import Settings
from aatc_cli.evals.speed.result import REFERENCE, SpeedRow, draft_of_profile
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.timing import alternate, speed_row
from aatc_cli.evals.subjects import EvalOptions, device_name
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import pick_dtype
from aatc_cli.models.placement import find_device
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.collecting.stopwatch import clock
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.stages.whitening import whiten_layer
from aatc_cli.text.windows import Windows

# rotary base of Llama 3.1
_THETA = 500_000.0
# passes of a repeat
_PASSES = 2
_KINDS: tuple[str, ...] = ("whiten", "metric")
# tokens of a window that enter no statistic, and those that a gradient needs more than
_SKIPPED = 4
_EXACT = Window().sinks + Window().recent
# layers whose transforms are made on the CPU too, for comparison
_COMPARED = 2

Size = tuple[int, int]


class _Silent:
    """A progress bar that shows nothing."""

    def advance(self, steps: int = 1) -> None:
        """Nothing."""


@dataclass
class OfflineBench:
    """A random model of a geometry, and the passes of collect over random tokens that are timed on it."""

    geometry: Geometry
    model: Any
    device: torch.device

    @classmethod
    def of(cls, profile: ModelProfile, device: torch.device, dtype: torch.dtype) -> OfflineBench:
        """The model of a profile's geometry with weights drawn on ``device``."""
        return cls(profile.geometry, random_llama(profile.geometry, profile.context, _THETA, device, dtype), device)

    def windows(self, size: Size) -> Tensor:
        """Random tokens [W, T] of W = passes times batch windows, or of more where they would be too few to whiten."""
        context, batch = size
        few = -(-self.geometry.channels // (context - _SKIPPED))
        count = -(-max(_PASSES * batch, few) // batch) * batch
        generator = torch.Generator().manual_seed(context)
        return torch.randint(0, self.model.config.vocab_size, (count, context), generator=generator)

    def job(self, windows: Tensor) -> CollectJob:
        """Empty statistics for ``windows``."""
        count, length = windows.shape
        settings = CollectSettings(samples=count, length=length, skip_first=_SKIPPED, fisher=count)
        nothing = "0" * 64
        identity = ModelIdentity(
            name="random",
            revision=None,
            architecture="llama",
            config_hash=nothing,
            weights_fingerprint=nothing,
            tokenizer_hash=nothing,
            geometry=self.geometry,
        )
        how = {"dtype": str(self.model.dtype).removeprefix("torch."), "device": str(self.device)}
        drawn = Windows(windows.cpu(), [], nothing)
        return CollectJob(settings, identity, drawn, None, attention_sites(self.model), str(self.device), how)

    @torch.no_grad()
    def forward(self, windows: Tensor, batch: int) -> float:
        """Seconds of bare forward passes of the model's body."""
        began = clock(str(self.device))
        for part in torch.split(windows, batch):
            self.model.get_decoder()(input_ids=part.to(self.device), use_cache=False)
        return clock(str(self.device)) - began

    def statistics(self, windows: Tensor, batch: int, job: CollectJob | None = None) -> float:
        """Seconds of the same passes with statistics, into ``job`` or one of their own."""
        job = job or self.job(windows)
        began = clock(str(self.device))
        run_forward(job, self.model, windows, 0, self._options(batch), Timer(), Path(), _Silent())
        return clock(str(self.device)) - began

    def gradients(self, windows: Tensor, batch: int, job: CollectJob | None = None) -> float:
        """Seconds of gradient passes over the same windows; raises `AatcError` where they do not fit."""
        job = job or self.job(windows)
        began = clock(str(self.device))
        run_gradients(job, self.model, windows, 0, self._options(batch), Timer(), Path(), _Silent())
        return clock(str(self.device)) - began

    def _options(self, batch: int) -> CollectOptions:
        return CollectOptions(device=str(self.device), batch=batch, checkpoint_seconds=float("inf"))


def offline_speed(task: Task, call: Call, settings: Settings) -> list[SpeedResult]:
    """The times of a profile's geometry at every size, written into one file; raises as `measure_offline` does."""
    profile, options = call.profile, call.options
    if profile is None:
        raise UsageError("offline-speed is of a profile's geometry", "give --profile")
    find_device(options.device)
    protocol = {
        "task": task.name,
        "profile": profile.name,
        "geometry": profile.geometry.model_dump(mode="json"),
        "context": list(settings.context),
        "batch": list(settings.batch),
        "repeats": settings.repeats,
        "device": device_name(options.device),
        "dtype": str(pick_dtype(options.device, options.dtype)),
        "threads": torch.get_num_threads(),
        "versions": {name: versions()[name] for name in ("aatc", "torch", "transformers")},
    }
    draft = draft_of_profile("offline-stages", None, protocol, None)
    found = already(call.run.evals, draft, force=options.force)
    if found is not None:
        say(f"eval: speed of the offline stages of {profile.name} is there already, nothing to do")
        return [found]
    sizes = [(context, batch) for context in settings.context for batch in settings.batch]
    timed = measure_offline(profile, sizes, settings.repeats, options)
    result = timed.model_copy(update={"protocol": protocol})
    say(f"eval: speed of the offline stages of {profile.name} -> {write_evaluation(call.run.evals, result)}")
    return [result]


def measure_offline(profile: ModelProfile, sizes: list[Size], repeats: int, options: EvalOptions) -> SpeedResult:
    """Time passes of collect at every (context, batch), and whiten of the Stats that the smallest of them give.

    The reference of a pass is the bare forward pass over the same tokens, so that a ratio is its cost in forward
    passes. whiten is timed as the command is, with files. Each part is told as it is done, and gradients that do not
    fit into memory are left out. Raises `AatcError` for a device that is not there, `UsageError` for windows that are
    no longer than what a query reads exactly.
    """
    for context, _ in sizes:
        if context <= _EXACT + 1:
            problem = f"windows of {context} tokens have nothing beyond the {_EXACT} that a query reads exactly"
            raise UsageError(problem, "raise --context")
    device, began = find_device(options.device), time.perf_counter()
    bench = OfflineBench.of(profile, device, pick_dtype(options.device, options.dtype))
    rows: list[SpeedRow] = []
    left_out: dict[str, str] = {}
    for size in sizes:
        rows += _passes(bench, size, repeats, left_out)
    smallest = min(sizes, key=lambda size: size[0] * size[1])
    with TemporaryDirectory(prefix="aatc-") as folder:
        rows += _whitened(bench, smallest, Run(Path(folder)))
    return SpeedResult(
        recipe="offline-stages",
        model=profile.name,
        bits=16.0,
        seconds=time.perf_counter() - began,
        device=device_name(options.device),
        dtype=str(bench.model.dtype).removeprefix("torch."),
        versions=versions(),
        synthetic=True,
        absolute=device.type == "cuda",
        threads=torch.get_num_threads(),
        repeats=repeats,
        steps=1,
        rows=rows,
        checks=[],
        left_out=left_out,
    )


def _passes(bench: OfflineBench, size: Size, repeats: int, left_out: dict[str, str]) -> list[SpeedRow]:
    context, batch = size
    windows = bench.windows(size)
    passes = windows.shape[0] // batch
    timed: dict[str, Callable[[], float]] = {
        REFERENCE: lambda: bench.forward(windows, batch) / passes,
        "statistics": lambda: bench.statistics(windows, batch) / passes,
        "gradients": lambda: bench.gradients(windows, batch) / passes,
    }
    for name, once in list(timed.items()):
        try:
            once()  # a first pass loads kernels
        except AatcError as error:
            left_out[f"{name} {context} x {batch}"] = error.message
            say(f"eval: {name} at {context} x {batch} is left out: {error.message}")
            del timed[name]
    seconds = dict(zip(timed, alternate(list(timed.values()), repeats), strict=True))
    rows = [speed_row("collect", context, batch, name, seconds[name], seconds[REFERENCE]) for name in timed]
    for row in rows:
        rate = context * batch / row.milliseconds * 1e3
        say(f"eval: {row.backend} at {context} x {batch}: {rate:.0f} tokens per second, {row.ratio:.3f} forward passes")
    return rows


def _whitened(bench: OfflineBench, size: Size, place: Run) -> list[SpeedRow]:
    """whiten of real Stats, and of some of their layers on the device and on the CPU."""
    windows = bench.windows(size)
    job = bench.job(windows)
    bench.statistics(windows, size[1], job)
    bench.gradients(windows, size[1], job)
    job.write(place.stats(), windows.shape[0], windows.shape[0])
    samples, device = job.layers[0].filled, bench.device

    def command(kind: str) -> float:
        began = time.perf_counter()
        whiten(
            place,
            transform_stats=place.stats(),
            rate_stats=place.stats(),
            wanted=Wanted(kind),
            device=str(device),
            force=True,
        )
        return time.perf_counter() - began

    def some(kind: str, where: torch.device, layers: list[LayerStats]) -> float:
        began = time.perf_counter()
        for stats in layers:
            whiten_layer(stats, stats, WhitenSettings(transform=kind), where)
        return time.perf_counter() - began

    rows = []
    for kind in _KINDS:
        seconds = [command(kind) for _ in range(_PASSES)]
        rows.append(speed_row("whiten", samples, len(job.layers), f"{kind}, command", seconds, seconds))
        say(f"eval: aatc whiten --transform {kind} of {len(job.layers)} layers: {min(seconds):.2f} s at best")
    stats = Stats.open(place.stats())
    layers = [stats.layer(layer) for layer in range(min(_COMPARED, len(job.layers)))]
    for kind in _KINDS:
        host = torch.device("cpu")
        times = {str(where): [some(kind, where, layers) for _ in range(_PASSES)] for where in (host, device)}
        for name, seconds in times.items():
            rows.append(speed_row("whiten", samples, len(layers), f"{kind}, {name}", seconds, times[str(host)]))
            say(f"eval: {kind} of {len(layers)} layers on {name}, without files: {min(seconds):.2f} s at best")
    return rows
