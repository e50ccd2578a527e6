"""collect: run the model over calibration text and keep second moments, sampled rows and nothing else."""

from __future__ import annotations

import math
from contextlib import nullcontext

from aatc_cli.artifacts.disk import replace_directory
from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.console import say, working
from aatc_cli.models.loading import ModelSource, leading_device, load_model
from aatc_cli.profiles import ModelProfile, TextMixture
from aatc_cli.stages.collecting.checks import check_gradients, check_spread, warn_of_rank
from aatc_cli.stages.collecting.opening import opened
from aatc_cli.stages.collecting.portions import gather, tell_cost
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
    timer, run = gather(task, job, model)
    processes.add_up(job.layers)
    manifest = None
    if processes.first:
        manifest = job.write(task.partial, settings.windows, settings.gradients)
        replace_directory(task.partial, task.target)
    tell_cost(task, timer, run)
    if manifest is not None:
        stats = Stats.open(task.target)
        assert stats.value_rank is not None
        assert stats.distinct_tokens is not None
        warn_of_rank(stats.value_rank, stats.distinct_tokens, stats.geometry.channels)
    return manifest
