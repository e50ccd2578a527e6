"""Plans of one recipe and budget, each calibrated on Stats of its own, on the same windows of every text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.stats import Stats
from aatc_cli.errors import UsageError
from aatc_cli.evals.forced.scores import Scores
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.stability.predicted import predictions
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

    def measured() -> Result:
        began = time.perf_counter()
        predicted = [predictions(one.plan, [each.stats for each in plans]) for one in plans]
        rows = [row for frame in frames for row in _score(plans, predicted, frame)]
        return _result(opened, settings, plans, frames, rows, time.perf_counter() - began)

    what = f"stability of {draft.method}"
    return kept(opened.run.evals, draft, what, force=opened.options.force, measured=measured)


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
