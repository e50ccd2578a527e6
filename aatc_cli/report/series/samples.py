"""Evaluations as figures that can be compared: a mean with the samples it is of."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core.compare import Figure, interval
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.study_scores import mean_of_rows


def kl_figure(e: Evaluation) -> Figure | None:
    """KL of an evaluation with its windows; None where it measured none."""
    if e.kl_mean is None:
        return None
    return Figure(e.kl_mean, e.kl_stderr, {"": e.kl_windows} if e.kl_windows else {})


def nll_figure(e: Evaluation) -> Figure | None:
    """Negative log-likelihood with its windows, by which perplexities are compared; None where it measured none."""
    if e.nll is None:
        return None
    return Figure(e.nll, e.nll_stderr, {"": e.nll_windows} if e.nll_windows else {})


def nll_change(e: Evaluation) -> tuple[float | None, float | None]:
    """How far NLL lies above the model's own on the same positions, and the error of that difference by windows."""
    if e.nll is None or e.nll_reference is None:
        return None, None
    if not e.nll_windows or not e.nll_reference_windows:
        return e.nll - e.nll_reference, None
    gaps = [ours - own for ours, own in zip(e.nll_windows, e.nll_reference_windows, strict=True)]
    return mean_and_stderr(gaps)


def score_figure(rows: Sequence[BenchmarkRow]) -> Figure | None:
    """Mean score over rows with the samples of each; None without rows."""
    score = mean_of_rows(list(rows))
    if score is None:
        return None
    kept: dict[str, Sequence[float]] = {f"{row.subtask} {row.prompts_sha256}": row.scores for row in rows if row.scores}
    return Figure(score.mean, score.stderr, kept if len(kept) == len(rows) else {})


def score_interval(figure: Figure) -> tuple[float, float] | None:
    """95 % interval of a score of hits and misses; None where samples were not kept or are neither."""
    return interval(list(figure.parts.values()))
