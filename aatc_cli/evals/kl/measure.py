"""Divergence of the next token's distribution from the uncompressed model's, at every scored position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.evals.forced.scores import Scores
from aatc_cli.evals.forced.traces import token_traces
from aatc_cli.evals.kl.result import Result
from aatc_cli.evals.kl.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import Frame
from aatc_cli.evals.windows.measure import forced_scores, measure_windows


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """KL, agreement and likelihood of every subject on every text; raises as `measure_windows` does."""
    return measure_windows(opened, settings, _run)


def _run(frame: Frame, subjects: Sequence[Subject]) -> list[Result]:
    return [
        frame.evaluation(subject, scores.seconds, _measured(frame, scores), scores.kept_shares())
        for subject, scores in zip(subjects, forced_scores(frame, subjects), strict=True)
    ]


def _measured(frame: Frame, scores: Scores) -> dict[str, Any]:
    found = scores.kl_summary() | scores.nll_summary()
    if not frame.settings.traced:
        return found
    raw, first = frame.opened.tokenizer.raw, frame.settings.first_position
    return found | {"traces": token_traces(scores, frame.windows.tokens, first, frame.settings.traced, raw.decode)}
