"""Times of the offline stages in a geometry: passes of collect at every size, and whiten."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Window
from aatc_cli.console import say
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.speed.result import REFERENCE, Result, SpeedRow
from aatc_cli.evals.speed.timing import alternate, speed_row
from aatc_cli.evals.subjects import EvalOptions, device_name
from aatc_cli.models.loading import pick_dtype
from aatc_cli.models.placement import find_device
from aatc_cli.profiles import ModelProfile
from aatc_cli.studies.offline_model import OfflineBench, Size
from aatc_cli.studies.offline_whiten import whiten_rows

# tokens of a window that a gradient needs more than
_EXACT = Window().sinks + Window().recent


def measure_offline(profile: ModelProfile, sizes: list[Size], repeats: int, options: EvalOptions) -> Result:
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
        rows += whiten_rows(bench, smallest, Run(Path(folder)))
    return Result(
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
