"""collect: run the model over calibration text and keep second moments, sampled rows and nothing else."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.disk import replace_directory
from aatc_cli.artifacts.manifest import Manifest, ModelIdentity
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.console import progress, say, working
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import ModelSource, identify, leading_device, load_config, load_model, load_tokenizer
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile, TextMixture
from aatc_cli.stages.collecting.checks import check_rank, warn_of_rank
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.processes import Processes, joined
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.collecting.shortage import memory_enough
from aatc_cli.text.windows import Windows, draw_windows

_LESS = "close other programs, or lower --batch; --dtype bfloat16 halves the model"


@dataclass(frozen=True)
class _Task:
    """What is collected, and how: model and text, where the Stats go, and which of the processes this one is."""

    target: Path
    partial: Path
    source: ModelSource
    identity: ModelIdentity
    drawn: Windows
    bos: int | None
    settings: CollectSettings
    options: CollectOptions
    profile: ModelProfile | None
    processes: Processes


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
    options = replace(options, device=leading_device(options.device, spread=options.spread))
    with joined(options.device) as processes, memory_enough(f"collecting with {source.name}", _LESS):
        if options.spread and processes.count > 1:
            raise UsageError("--device-map auto uses all GPUs in one process", "start it without torchrun")
        own = replace(options, device=processes.device(options.device))
        if processes.count > 1:
            own = replace(own, checkpoint_seconds=math.inf)
        identity, drawn, bos = _opened(source, mixture, settings, profile)
        places = run.stats(name), run.checkpoint(name)
        task = _Task(*places, source, identity, drawn, bos, settings, own, profile, processes)
        with run.lock() if processes.first else nullcontext():
            existing = _existing(task) if processes.first else None
            if processes.agree(existing is not None):
                say(f"collect: inputs unchanged, nothing to do ({task.target})")
                return existing
            return _collected(task)


def _opened(
    source: ModelSource, mixture: TextMixture, settings: CollectSettings, profile: ModelProfile | None
) -> tuple[ModelIdentity, Windows, int | None]:
    """Which model it is, and the windows of text, once both are known to serve."""
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
        identity = identify(source, config, tokenizer)
    check_profile(profile, identity.geometry)
    check_length(settings.length, config)
    check_rank(settings, identity.geometry)
    with working("reading and tokenizing the text"):
        drawn = draw_windows(
            mixture.sources,
            tokenizer.encode,
            samples=settings.samples,
            length=settings.length,
            seed=settings.seed,
            bos=tokenizer.bos,
        )
    check_tokens(drawn.tokens, config)
    return identity, drawn, tokenizer.bos


def _existing(task: _Task) -> Manifest | None:
    """The finished Stats that are there already, if they are the ones asked for; refuses a checkpoint of others."""
    wanted = Stats.wanted(task.settings, task.identity, task.drawn.records)
    existing = unchanged(task.target, "stats", wanted, force=task.options.force)
    if existing is None:
        if task.options.force:
            shutil.rmtree(task.partial, ignore_errors=True)
        unchanged(task.partial, "stats", wanted, force=False)
        if task.processes.count > 1 and task.partial.exists():
            raise AatcError(
                f"{task.partial} is the checkpoint of one process, which several cannot continue",
                "finish it without torchrun, or start over with --force",
            )
    return existing


def _collected(task: _Task) -> Manifest | None:
    """Run the model over this process's share of the windows; the first process writes what all found."""
    settings, options, processes = task.settings, task.options, task.processes
    with working(f"loading {task.source.name}"):
        placed = "auto" if options.spread else None
        model = load_model(task.source, device=options.device, dtype=options.dtype, device_map=placed)
    if settings.fisher and model.dtype == torch.float16:
        raise UsageError("gradients of a float16 model vanish below 6e-8", "run with --dtype bfloat16 or float32")
    job = CollectJob(
        settings, task.identity, task.drawn, task.bos, attention_sites(model), options.place, _how(task, model)
    )
    (start, stop), (fisher_start, fisher_stop) = processes.share(settings.samples), processes.share(settings.fisher)
    if processes.count > 1:
        job.begin_at(start)
    else:
        start, fisher_start = job.resume(task.partial)
        if start or fisher_start:
            say(f"collect: continuing from window {start} of {settings.samples}, gradients from {fisher_start}")
    timer, tokens = Timer(), task.drawn.tokens
    with progress("collect", stop, start) as ticker:
        run_forward(job, model, tokens[:stop], start, options, timer, task.partial, ticker)
    if settings.fisher:
        with progress("collect gradients", fisher_stop, fisher_start) as ticker:
            run_gradients(job, model, tokens[:fisher_stop], fisher_start, options, timer, task.partial, ticker)
    processes.add_up(job.layers)
    manifest = None
    if processes.first:
        manifest = job.write(task.partial, settings.samples, settings.fisher)
        replace_directory(task.partial, task.target)
    _tell_cost(job, timer, stop - start, fisher_stop - fisher_start, task.target)
    if manifest is not None:
        stats = Stats.open(task.target)
        assert stats.value_rank is not None
        assert stats.distinct_tokens is not None
        warn_of_rank(stats.value_rank, stats.distinct_tokens, stats.geometry.channels)
    return manifest


def _how(task: _Task, model: Any) -> dict[str, Any]:
    """How it is collected, which no digest covers."""
    options, count = task.options, task.processes.count
    return (
        {"dtype": str(model.dtype).removeprefix("torch."), "device": options.device, "batch": options.batch}
        | ({"profile": task.profile.name} if task.profile else {})
        | ({"processes": count} if count > 1 else {})
        | ({"device_map": "auto"} if options.spread else {})
    )


def _tell_cost(job: CollectJob, timer: Timer, windows: int, fisher: int, target: Path) -> None:
    forward = timer.total - timer.statistics
    say(
        f"collect: {job.tokens(job.settings.samples)} tokens; forward {forward:.1f} s, "
        f"statistics {timer.statistics:.1f} s ({100 * timer.statistics / max(forward, 1e-9):.0f} % of it) -> {target}"
    )
    if fisher and windows:
        ratio = (timer.fisher / fisher) / max(forward / windows, 1e-9)
        say(f"collect: gradients {timer.fisher:.1f} s; Fisher: {ratio:.1f} forward passes per window")
