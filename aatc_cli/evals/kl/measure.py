"""Divergence of the next token's distribution from the uncompressed model's, at every scored position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    return measure_windows(opened, settings, partial(_run, settings.traces))


def _run(traces: int, frame: Frame, subjects: Sequence[Subject]) -> list[Result]:
    found = zip(subjects, forced_scores(frame, subjects), strict=True)
    return [
        frame.evaluation(subject, scores.seconds, _measured(traces, frame, scores), scores.class_shares())
        for subject, scores in found
    ]


def _measured(traces: int, frame: Frame, scores: Scores) -> dict[str, Any]:
    found = scores.kl_summary() | scores.nll_summary()
    if not traces:
        return found
    windows, first = frame.windows.tokens, frame.settings.first_position
    return found | {"traces": token_traces(scores, windows, first, traces, frame.opened.tokenizer.raw.decode)}
