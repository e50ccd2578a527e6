"""collect: run the model over calibration text and keep second moments, sampled rows and nothing else."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.disk import replace_directory
from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.config import Geometry
from aatc_cli.console import progress, say, working
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import ModelSource, identify, leading_device, load_config, load_model, load_tokenizer
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile, TextMixture
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.processes import Processes, joined
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.text.windows import draw_windows


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
    checkpoints. Raises `AatcError` for unusable text or activations, `SettingsMismatchError` when the Stats exist with
    others.
    """
    options = replace(options, device=leading_device(options.device, spread=options.spread))
    with joined(options.device) as processes:
        if options.spread and processes.count > 1:
            raise UsageError("--device-map auto uses all GPUs in one process", "start it without torchrun")
        own = replace(options, device=processes.device(options.device))
        if processes.count > 1:
            own = replace(own, checkpoint_seconds=math.inf)
        return _collect(run, name, source, mixture, settings, own, profile, processes)


def _collect(
    run: Run,
    name: str,
    source: ModelSource,
    mixture: TextMixture,
    settings: CollectSettings,
    options: CollectOptions,
    profile: ModelProfile | None,
    processes: Processes,
) -> Manifest | None:
    target, partial = run.stats(name), run.checkpoint(name)
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
    wanted = Stats.wanted(settings, identity, drawn.records)
    with run.lock() if processes.first else nullcontext():
        existing = _existing(run, name, wanted, options, processes) if processes.first else None
        if processes.agree(existing is not None):
            say(f"collect: inputs unchanged, nothing to do ({target})")
            return existing
        with working(f"loading {source.name}"):
            placed = "auto" if options.spread else None
            model = load_model(source, device=options.device, dtype=options.dtype, device_map=placed)
        if settings.fisher and model.dtype == torch.float16:
            raise UsageError("gradients of a float16 model vanish below 6e-8", "run with --dtype bfloat16 or float32")
        sites = attention_sites(model)
        job = CollectJob(
            settings,
            identity,
            drawn.records,
            sites,
            options.place,
            {"dtype": str(model.dtype).removeprefix("torch."), "device": options.device, "batch": options.batch}
            | ({"profile": profile.name} if profile else {})
            | ({"processes": processes.count} if processes.count > 1 else {})
            | ({"device_map": "auto"} if options.spread else {}),
        )
        (first, stop), (fisher_first, fisher_stop) = processes.share(settings.samples), processes.share(settings.fisher)
        start, fisher_start = job.resume(partial) if processes.count == 1 else (first, fisher_first)
        if processes.count > 1:
            job.begin_at(start)
        if processes.count == 1 and (start or fisher_start):
            say(f"collect: continuing from window {start} of {settings.samples}, gradients from {fisher_start}")
        timer = Timer()
        with progress("collect", stop, start) as ticker:
            run_forward(job, model, drawn.tokens[:stop], start, options, timer, partial, ticker)
        if settings.fisher:
            with progress("collect gradients", fisher_stop, fisher_start) as ticker:
                run_gradients(job, model, drawn.tokens[:fisher_stop], fisher_start, options, timer, partial, ticker)
        processes.add_up(job.layers)
        manifest = None
        if processes.first:
            manifest = job.write(partial, settings.samples, settings.fisher)
            replace_directory(partial, target)
    _tell_cost(job, timer, stop - start, fisher_stop - fisher_start, target)
    return manifest


def _existing(
    run: Run, name: str, wanted: dict[str, Any], options: CollectOptions, processes: Processes
) -> Manifest | None:
    """The finished Stats that are there already, if they are the ones asked for; refuses a checkpoint of others."""
    partial = run.checkpoint(name)
    existing = unchanged(run.stats(name), "stats", wanted, force=options.force)
    if existing is None:
        if options.force:
            shutil.rmtree(partial, ignore_errors=True)
        unchanged(partial, "stats", wanted, force=False)
        if processes.count > 1 and partial.exists():
            raise AatcError(
                f"{partial} is the checkpoint of one process, which several cannot continue",
                "finish it without torchrun, or start over with --force",
            )
    return existing


def _tell_cost(job: CollectJob, timer: Timer, windows: int, fisher: int, target: Path) -> None:
    forward = timer.total - timer.statistics
    say(
        f"collect: {job.tokens(job.settings.samples)} tokens; forward {forward:.1f} s, "
        f"statistics {timer.statistics:.1f} s ({100 * timer.statistics / max(forward, 1e-9):.0f} % of it) -> {target}"
    )
    if fisher and windows:
        ratio = (timer.fisher / fisher) / max(forward / windows, 1e-9)
        say(f"collect: gradients {timer.fisher:.1f} s; Fisher: {ratio:.1f} forward passes per window")


def check_rank(settings: CollectSettings, geometry: Geometry) -> None:
    """Raise `AatcError` when the calibration cannot determine the moments: no tokens, or fewer than channels."""
    if settings.length <= settings.skip_first:
        raise AatcError(
            f"windows of {settings.length} tokens have nothing left after the first {settings.skip_first}",
            "raise --length",
        )
    if settings.fisher > settings.samples:
        raise UsageError(
            f"--fisher {settings.fisher} asks for more windows than the {settings.samples} that are drawn",
            "raise --samples, or lower --fisher",
        )
    exact = settings.window.sinks + settings.window.recent
    if settings.fisher and settings.length <= exact + 1:
        raise AatcError(
            f"windows of {settings.length} tokens fit into the {exact} that a query reads exactly: "
            "nothing would be compressed and every gradient would be zero",
            "raise --length well above that, to 1024 say",
        )
    tokens = settings.samples * (settings.length - settings.skip_first)
    if tokens < geometry.channels:
        raise AatcError(
            f"{tokens} calibration tokens are fewer than the {geometry.channels} channels of a site: "
            "their second moment would be rank-deficient",
            f"raise --samples or --length; ten times the channels ({10 * geometry.channels} tokens) is a sound minimum",
        )
