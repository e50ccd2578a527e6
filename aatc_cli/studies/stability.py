"""eval --task stability: one recipe calibrated on several Stats, and how far their plans agree on the same text.

Stats of two draws from the same texts (two seeds) tell how much is owed to the draw, Stats of two corpora how much to
the domain. Every Stats gets a Transform and a Plan of its own under RUN/stability/STATS.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.manifest import require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Budget
from aatc_cli.console import progress, say, working
from aatc_cli.core import SIDES
from aatc_cli.core.weights import fisher_weights
from aatc_cli.errors import UsageError
from aatc_cli.evals.forced.scores import Scores, score_windows
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.evals.stability import StabilityResult, StabilityRow, spread
from aatc_cli.evals.subjects import EvalOptions, Subject, device_name, subject_codecs
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import ModelSource, identify, load_config, load_model, load_tokenizer, pick_dtype
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.evaluate import EvalSettings
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.text.windows import Windows, consecutive_windows


@dataclass(frozen=True)
class _Calibrated:
    """One Stats, the plan made from it alone, and the KL that the gradients of every Stats predict for that plan."""

    name: str
    stats: Stats
    plan: Plan
    predicted: list[float | None]


def stability(
    run: Run,
    source: ModelSource,
    recipe: Recipe,
    budget: Budget,
    stats: Sequence[Path],
    texts: Sequence[str],
    settings: EvalSettings,
    options: EvalOptions,
) -> StabilityResult:
    """Calibrate ``recipe`` on each of two or more ``stats`` and score all plans on the same windows of every text.

    Raises `UsageError` for fewer than two Stats, `ArtifactError` for Stats of another model.
    """
    if len(stats) < 2 or len({path.name for path in stats}) < len(stats):
        raise UsageError("stability compares two or more Stats of different names", "repeat --stats")
    if recipe.choices.allocator.nothing:
        raise UsageError(f"recipe {recipe.name} is calibrated on nothing", "name a recipe that makes plans")
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    check_length(settings.length, config)
    opened = [Stats.open(path) for path in stats]
    for artifact in opened:
        require_model(identity, artifact.model, str(artifact.path))
    frames = [
        consecutive_windows(text, tokenizer.encode, length=settings.length, limit=settings.limit, bos=tokenizer.bos)
        for text in texts
    ]
    for frame in frames:
        check_tokens(frame.tokens, config)
    plans = [_plan(run, artifact.path, recipe, budget) for artifact in opened]
    found = [
        _Calibrated(a.path.name, a, plan, _predictions(plan, opened)) for a, plan in zip(opened, plans, strict=True)
    ]
    with working(f"loading {source.name}"):
        model = load_model(source, device=options.device, dtype=options.dtype)
    began = time.perf_counter()
    rows = [row for frame in frames for row in _score(model, found, frame, settings, options)]
    result = StabilityResult(
        recipe=recipe.name,
        budget=budget.label,
        model=identity.name,
        model_fingerprint=identity.weights_fingerprint,
        bits=sum(plan.mean_bits for plan in plans) / len(plans),
        bits_packed=sum(plan.layout.bits_packed for plan in plans) / len(plans),
        seconds=time.perf_counter() - began,
        device=device_name(options.device),
        dtype=str(pick_dtype(options.device, options.dtype)).removeprefix("torch."),
        versions=versions(),
        length=settings.length,
        first_position=settings.first_position,
        windows=[frame.tokens.shape[0] for frame in frames],
        rows=rows,
        kl_spread=spread(rows),
    )
    say(f"eval: stability of {recipe.name} {budget.label} -> {write_evaluation(run.evals, result)}")
    return result


def _plan(run: Run, stats: Path, recipe: Recipe, budget: Budget) -> Plan:
    place = run.within("stability", stats.name)
    whiten(place, transform_stats=stats, rate_stats=stats, wanted=Wanted.by(recipe), force=True)
    return allocate(place, recipe, [budget], force=True)[0]


@torch.no_grad()
def _predictions(plan: Plan, stats: Sequence[Stats]) -> list[float | None]:
    """Second-order KL of a plan in nats per position by the loss gradients of each Stats; None where it has none."""
    transform = plan.transform()
    sums: list[list[float]] = [[] for _ in stats]
    classes = transform.tables(plan.recipe.choices).classes
    for layer, widths in enumerate(plan.bits):
        held = [artifact.layer(layer) for artifact in stats]
        for side in SIDES:
            name = f"layers.{layer}.{side}"
            decode, variance = transform.artifact.tensor(f"{name}.decode"), transform.artifact.array(f"{name}.variance")
            rows = np.array(widths[side]).reshape(-1, variance.size)
            # a class of tokens counts by its share and by what noise in it costs
            parts = np.ones(1) if classes is None else (classes.shares * classes.costs[side])[layer]
            noise = parts @ plan.recipe.choices.channel_curves(variance)[np.arange(variance.size), rows]
            for total, layer_stats in zip(sums, held, strict=True):
                weights = fisher_weights(decode, layer_stats.loss_metric(side)).numpy()
                total.append(0.5 * float(np.sum(noise * weights)))
    return [sum(total) if artifact.fisher_windows else None for total, artifact in zip(sums, stats, strict=True)]


def _score(
    model: Any, found: Sequence[_Calibrated], frame: Windows, settings: EvalSettings, options: EvalOptions
) -> list[StabilityRow]:
    sites = attention_sites(model)
    methods = [
        Method(
            one.name,
            subject_codecs(Subject(one.plan.recipe, one.plan), len(sites), options.device),
            one.plan.recipe.window,
            one.plan.recipe.coordinates,
        )
        for one in found
    ]
    with progress("eval stability", frame.tokens.shape[0] * (1 + len(methods))) as ticker:
        scores = score_windows(
            model,
            sites,
            methods,
            frame.tokens,
            settings.first_position,
            lambda name: ticker.advance(text=f"eval stability: {name}"),
        )
    return [_row(index, found, frame, score) for index, score in enumerate(scores)]


def _row(index: int, found: Sequence[_Calibrated], frame: Windows, scores: Scores) -> StabilityRow:
    one, summary = found[index], scores.kl_summary()
    assert summary["kl_mean"] is not None
    others = [value for i, value in enumerate(one.predicted) if i != index and value is not None]
    return StabilityRow(
        stats=one.name,
        stats_digest=one.stats.digest,
        calibration=[record.name for record in one.stats.texts],
        text=frame.records[0].name,
        text_sha256=frame.records[0].sha256,
        bits=one.plan.mean_bits,
        kl_mean=summary["kl_mean"],
        kl_stderr=summary["kl_stderr"],
        predicted=one.predicted[index],
        predicted_elsewhere=sum(others) / len(others) if others else None,
    )
