"""Perplexity of held-out text with the compressed cache, beside the uncompressed model's on the same positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aatc_cli.evals.forced.scores import Scores
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.perplexity.result import Result
from aatc_cli.evals.perplexity.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import Frame
from aatc_cli.evals.windows.measure import forced_scores, measure_windows


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Perplexity of every subject on every text; raises as `measure_windows` does."""
    return measure_windows(opened, settings, _run)


def _run(frame: Frame, subjects: Sequence[Subject]) -> list[Result]:
    return [
        frame.evaluation(subject, scores.seconds, _measured(scores), scores.kept_shares())
        for subject, scores in zip(subjects, forced_scores(frame, subjects), strict=True)
    ]


def _measured(scores: Scores) -> dict[str, Any]:
    nll = scores.nll_summary()
    mean, stderr, reference = nll["nll"], nll["nll_stderr"], nll["nll_reference"]
    assert mean is not None
    assert reference is not None
    perplexity = _exponential(mean)
    return nll | {
        "perplexity": perplexity,
        # delta method: the derivative of exp is exp itself
        "perplexity_stderr": None if stderr is None else perplexity * stderr,
        "perplexity_reference": _exponential(reference),
    }


def _exponential(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).exp())
