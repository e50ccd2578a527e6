"""collect: run the model over calibration text and keep second moments, sampled rows and nothing else."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.disk import replace_directory
from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.console import progress, say, working
from aatc_cli.errors import AatcError
from aatc_cli.models.loading import ModelSource, leading_device, load_model
from aatc_cli.profiles import ModelProfile, TextMixture
from aatc_cli.stages.collecting.checks import check_gradients, check_spread, warn_of_rank
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.opening import opened
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.processes import joined
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.collecting.shortage import memory_enough
from aatc_cli.stages.collecting.task import Task

_LESS = "close other programs, or lower --batch; --dtype bfloat16 halves the model"


def collect(
    run: Run,
    name: str,
    source: ModelSource,
    mixture: TextMixture,
    settings: CollectSettings,
    options: CollectOptions,
    profile: ModelProfile | None = None,
) -> Manifest | None:
    """Make the Stats ``name`` of ``run``, or continue an interrupted one from its last checkpoint.

    Under torchrun the windows are shared over its processes; all but the first return None, and there are no
    checkpoints. Raises `AatcError` for unusable text or activations and for too little memory,
    `SettingsMismatchError` when the Stats exist with others.
    """
    options = options.model_copy(update={"device": leading_device(options.device, spread=options.spread)})
    with joined(options.device) as processes, memory_enough(f"collecting with {source.name}", _LESS):
        check_spread(processes.count, spread=options.spread)
        own = options.model_copy(update={"device": processes.device(options.device)})
        if processes.count > 1:
            own = own.model_copy(update={"checkpoint_seconds": math.inf})
        identity, drawn, bos = opened(source, mixture, settings, profile)
        places = run.stats(name), run.checkpoint(name)
        also = {windows: run.stats(f"{name}-{windows}") for windows in sorted(set(options.also))}
        task = Task(*places, source, identity, drawn, bos, settings, own, profile, processes, also)
        with run.lock() if processes.first else nullcontext():
            existing = task.existing() if processes.first else None
            if processes.agree(existing is not None):
                say(f"collect: inputs unchanged, nothing to do ({task.target})")
                return existing
            return _collected(task)


def _collected(task: Task) -> Manifest | None:
    """Run the model over this process's share of the windows; the first process writes what all found."""
    settings, options, processes = task.settings, task.options, task.processes
    with working(f"loading {task.source.name}"):
        placed = "auto" if options.spread else None
        model = load_model(task.source, device=options.device, dtype=options.dtype, device_map=placed)
    check_gradients(settings, model.dtype)
    job = task.job(model)
    if processes.count > 1:
        job.begin_at(processes.share(settings.windows)[0], processes.share(settings.gradients)[0])
    else:
        start, fisher_start = job.resume(task.partial)
        if start or fisher_start:
            say(f"collect: continuing from window {start} of {settings.windows}, gradients from {fisher_start}")
    timer, before = Timer(), (job.windows, job.gradients)
    for windows, path in task.also.items():
        _keep(task, job, model, timer, windows, path)
    _run(task, job, model, timer, processes.share(settings.windows)[1], processes.share(settings.gradients)[1])
    processes.add_up(job.layers)
    manifest = None
    if processes.first:
        manifest = job.write(task.partial, settings.windows, settings.gradients)
        replace_directory(task.partial, task.target)
    run = job.windows - before[0], job.gradients - before[1]
    _tell_cost(job.tokens(settings.windows), timer, *run, task.target)
    if manifest is not None:
        stats = Stats.open(task.target)
        assert stats.value_rank is not None
        assert stats.distinct_tokens is not None
        warn_of_rank(stats.value_rank, stats.distinct_tokens, stats.geometry.channels)
    return manifest


def _run(task: Task, job: CollectJob, model: Any, timer: Timer, windows: int, gradients: int) -> None:
    """Go on until there are the sums of so many windows, and the gradients of so many of them."""
    options, tokens = task.options, task.drawn.tokens
    with progress("collect", windows, job.windows) as ticker:
        run_forward(job, model, tokens[:windows], job.windows, options, timer, task.partial, ticker)
    if task.settings.fisher:
        with progress("collect gradients", gradients, job.gradients) as ticker:
            run_gradients(job, model, tokens[:gradients], job.gradients, options, timer, task.partial, ticker)


def _keep(task: Task, job: CollectJob, model: Any, timer: Timer, windows: int, path: Path) -> None:
    """Go on until ``windows`` are done, and keep their Stats at ``path``; nothing where that was done before."""
    gradients = min(windows, task.settings.fisher)
    if job.windows <= windows and job.gradients <= gradients:
        _run(task, job, model, timer, windows, gradients)
        job.write(path, windows, gradients, task.of_first(windows))
        say(f"collect: {windows} windows so far -> {path}")
    elif not path.exists():
        problem = f"{task.partial} is past the {windows} windows of {path.name}"
        raise AatcError(problem, f"leave out --also {windows}, or start over with --force")


def _tell_cost(tokens: int, timer: Timer, windows: int, fisher: int, target: Path) -> None:
    forward = timer.total - timer.statistics
    say(
        f"collect: {tokens} tokens; forward {forward:.1f} s, "
        f"statistics {timer.statistics:.1f} s ({100 * timer.statistics / max(forward, 1e-9):.0f} % of it) -> {target}"
    )
    if fisher and windows:
        ratio = (timer.fisher / fisher) / max(forward / windows, 1e-9)
        say(f"collect: gradients {timer.fisher:.1f} s; Fisher: {ratio:.1f} forward passes per window")
