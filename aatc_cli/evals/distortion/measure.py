"""Measured against predicted error of the attention output of every layer, at the plan's widths and at uniform ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aatc_cli.console import progress
from aatc_cli.core.codec import TransformCodec
from aatc_cli.errors import UsageError
from aatc_cli.evals.distortion.layers import measure_distortion
from aatc_cli.evals.distortion.result import Result
from aatc_cli.evals.distortion.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject, subject_codecs
from aatc_cli.evals.windows.frame import Frame
from aatc_cli.evals.windows.measure import measure_windows
from aatc_cli.models.adapter import attention_sites


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Distortion of every subject on every text; raises `UsageError` for one whose noise is not predicted."""
    for subject in opened.subjects:
        _check(subject)
    return measure_windows(opened, settings, _run)


def _check(subject: Subject) -> None:
    if subject.plan is None:
        raise UsageError(f"{subject.name} has no quantizer to predict", "evaluate distortion of a plan")
    if subject.plan.classes.count > 1 or not subject.recipe.window.exact:
        what = "tokens at several rates" if subject.plan.classes.count > 1 else "its window in 8 bits"
        problem = f"the noise of {subject.name}, which keeps {what}, is not predicted"
        raise UsageError(problem, "name other plans by --plan or --recipe, or use aatc eval kl")
    if not subject.recipe.packed:
        problem = f"the noise of {subject.recipe.quantizer}, the quantizer of {subject.name}, is not predicted"
        raise UsageError(problem, "name other plans by --plan or --recipe, or use aatc eval kl")


def _run(frame: Frame, subjects: Sequence[Subject]) -> list[Result]:
    model, device = frame.opened.model(), frame.opened.options.device
    sites, tokens = attention_sites(model), frame.windows.tokens
    first, last = frame.settings.first_position, frame.settings.length - 1
    count = frame.settings.measured_queries or 1
    positions = [first + (last - first) * (i + 1) // count for i in range(count)]
    results = []
    with progress("eval distortion", len(subjects) * tokens.shape[0] * len(sites)) as ticker:
        for subject in subjects:
            began = time.perf_counter()
            codecs: list[dict[Any, TransformCodec]] = subject_codecs(subject, len(sites), device)
            rows = measure_distortion(model, sites, codecs, subject.recipe.window, tokens, positions, ticker.advance)
            results.append(frame.evaluation(subject, time.perf_counter() - began, {"distortion": rows}))
    return results
