"""Scores of a benchmark with several caches, for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow, indistinguishable
from aatc_cli.evals.rows import Rows, with_error


def benchmark_tables(results: Sequence[BenchmarkResult]) -> list[Rows]:
    """One row per subtask and context, one column per cache; a star where a score is told from fp16's."""
    reference = next((result for result in results if result.plan is None), None)
    places = list(dict.fromkeys(row.place for result in results for row in result.rows))
    columns = ["subtask", "context", "samples", *(result.method for result in results)]
    rows = []
    for subtask, context, metric in places:
        found = [_row(result, (subtask, context, metric)) for result in results]
        base = _row(reference, (subtask, context, metric)) if reference else None
        samples = "/".join(dict.fromkeys(str(row.samples) for row in found if row))
        rows.append([subtask, str(context or ""), samples, *(_score(row, base) for row in found)])
    contexts = list(dict.fromkeys(context for _, context, _ in places))
    for context in contexts:
        scores = [[row.score for row in result.rows if row.context == context] for result in results]
        if len({len(values) for values in scores}) == 1 and len(scores[0]) > 1:
            rows.append(["mean", str(context or ""), "", *(f"{100 * fmean(values):.1f}" for values in scores)])
    title = f"{results[0].benchmark}: score in % (95 % interval)"
    return [Rows(title + (", * not by chance (95 %)" if reference else ""), columns, rows), *_likelihoods(results)]


def _likelihoods(results: Sequence[BenchmarkResult]) -> list[Rows]:
    """Log-probabilities of right answers, where they were forced: a row per subtask and context."""
    places = list(dict.fromkeys(row.place for result in results for row in result.rows if row.logprob is not None))
    if not places:
        return []
    rows = []
    for place in places:
        found = [_row(result, place) for result in results]
        shown = [with_error(row.logprob, row.logprob_stderr) if row else "" for row in found]
        rows.append([place[0], str(place[1] or ""), *shown])
    title = f"{results[0].benchmark}: log-probability of the right answer (nats)"
    return [Rows(title, ["subtask", "context", *(result.method for result in results)], rows)]


def _row(result: BenchmarkResult, place: tuple[str, int | None, str]) -> BenchmarkRow | None:
    return next((row for row in result.rows if row.place == place), None)


def _score(row: BenchmarkRow | None, base: BenchmarkRow | None) -> str:
    if row is None:
        return ""
    error = "" if row.low is None or row.high is None else f" ({100 * row.low:.1f} to {100 * row.high:.1f})"
    apart = base is not None and base is not row and indistinguishable(row, base) is False
    return f"{100 * row.score:.1f}{error}{' *' if apart else ''}"
