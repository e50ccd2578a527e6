"""Plans of one recipe and budget, each calibrated on Stats of its own, on the same windows of every text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.stats import Stats
from aatc_cli.console import say
from aatc_cli.core import SIDES
from aatc_cli.core.weights import fisher_weights
from aatc_cli.errors import UsageError
from aatc_cli.evals.forced.scores import Scores
from aatc_cli.evals.keeping import already
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.stability.result import Result, StabilityRow, spread
from aatc_cli.evals.stability.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import Frame, check_packed
from aatc_cli.evals.windows.measure import forced_scores
from aatc_cli.evals.windows.seen import seen_in


@dataclass(frozen=True)
class Calibrated:
    """Stats and the plan made from them alone."""

    stats: Stats
    plan: Plan

    @property
    def name(self) -> str:
        """Name of the Stats."""
        return self.stats.path.name

    @property
    def subject(self) -> Subject:
        """The plan, to be evaluated."""
        return Subject(self.plan.recipe, self.plan)


def measure(opened: Opened, settings: Settings, plans: Sequence[Calibrated]) -> Result:
    """Score all plans on the windows of every text, and write one file; one that is there of the same is taken over.

    Raises `AatcError` for text that cannot be used, `SettingsMismatchError` for a result that is there of other plans.
    """
    opened.check_length(settings.length)
    for one in plans:
        check_packed(one.subject, settings.length)
    frames = [Frame.of(opened, settings, text) for text in settings.text]
    if len({frame.text for frame in frames}) < len(frames):
        raise UsageError(
            "two texts have one name, and rows are told apart by it", "rename one, or compare in two calls"
        )
    draft = _result(opened, settings, plans, frames, [_row(one, frame) for frame in frames for one in plans], 0.0)
    found = already(opened.run.evals, draft, force=opened.options.force)
    what = f"stability of {draft.method}"
    if found is not None:
        say(f"eval: {what} is there already, nothing to do")
        return found
    began = time.perf_counter()
    predicted = [_predictions(one.plan, [each.stats for each in plans]) for one in plans]
    rows = [row for frame in frames for row in _score(plans, predicted, frame)]
    result = _result(opened, settings, plans, frames, rows, time.perf_counter() - began)
    say(f"eval: {what} -> {write_evaluation(opened.run.evals, result)}")
    return result


def _result(
    opened: Opened,
    settings: Settings,
    plans: Sequence[Calibrated],
    frames: Sequence[Frame],
    rows: list[StabilityRow],
    seconds: float,
) -> Result:
    origin = opened.origin(plans[0].subject) | {"plan": None}
    origin |= {
        "bits": sum(one.plan.mean_bits for one in plans) / len(plans),
        "bits_packed": sum(one.plan.layout.bits_packed for one in plans) / len(plans),
    }
    return Result(
        **origin,
        protocol=opened.protocol(
            tokens=[frame.windows.digest for frame in frames],
            texts=[frame.windows.records[0].sha256 for frame in frames],
            length=settings.length,
            first=settings.first_position,
        ),
        seconds=seconds,
        length=settings.length,
        first_position=settings.first_position,
        windows=[frame.windows.tokens.shape[0] for frame in frames],
        rows=rows,
        kl_spread=spread(rows),
    )


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


def _score(plans: Sequence[Calibrated], predicted: list[list[float | None]], frame: Frame) -> list[StabilityRow]:
    scores = forced_scores(frame, [one.subject for one in plans])
    return [_scored(index, one, frame, predicted[index], scores[index]) for index, one in enumerate(plans)]


def _scored(index: int, one: Calibrated, frame: Frame, predicted: list[float | None], scores: Scores) -> StabilityRow:
    summary = scores.kl_summary()
    others = [value for i, value in enumerate(predicted) if i != index and value is not None]
    measured: dict[str, Any] = {
        "kl_mean": summary["kl_mean"],
        "kl_stderr": summary["kl_stderr"],
        "kl_windows": summary["kl_windows"],
        "predicted": predicted[index],
        "predicted_elsewhere": sum(others) / len(others) if others else None,
    }
    return _row(one, frame).model_copy(update=measured)


def _row(one: Calibrated, frame: Frame) -> StabilityRow:
    """The row of a plan on a text before it is scored."""
    return StabilityRow(
        stats=one.name,
        stats_digest=one.stats.digest,
        plan=one.plan.digest,
        calibration=[record.name for record in one.stats.texts],
        text=frame.text,
        text_sha256=frame.windows.records[0].sha256,
        calibration_share=seen_in(one.stats, frame.windows, frame.opened.tokenizer.bos),
        bits=one.plan.mean_bits,
        kl_mean=0.0,
        kl_stderr=None,
        predicted=None,
        predicted_elsewhere=None,
    )
