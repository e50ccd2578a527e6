"""Results that are not of windows of text, as tables: what eval prints, and inspect again from the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from aatc_cli.artifacts.disk import read_record
from aatc_cli.artifacts.evaluation import Evaluation, Measurement, read_measurement
from aatc_cli.evals.benchmark import BenchmarkResult, BenchmarkRow, indistinguishable
from aatc_cli.evals.memory import MemoryResult
from aatc_cli.evals.speed import SpeedResult
from aatc_cli.evals.speed_tables import memory_columns, speed_columns
from aatc_cli.evals.stability import COLUMNS, StabilityResult, stability_rows


class Rows(NamedTuple):
    """A table for people: title, names of columns, rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def read_result(path: Path) -> Measurement:
    """The evaluation in a file, of whichever task it says it is of; raises `ArtifactError` for anything else."""
    try:
        raw: Any = json.loads(read_record(path))
        task = str(raw.get("task")) if isinstance(raw, dict) else ""
    except (OSError, ValueError, RecursionError):
        task = ""
    # what no other task is, the reader of evaluations on text refuses in its own words
    return read_measurement(path, _KINDS[task][0] if task in _KINDS else Evaluation)


def result_table(result: Measurement) -> Rows | None:
    """The table that eval prints of one result, or None for an evaluation on text."""
    return _KINDS[result.task][1]([result]) if result.task in _KINDS else None


def memory_table(results: Sequence[MemoryResult]) -> Rows:
    """Bytes of every plan's cache at every size, in MB; columns that nothing filled are left out."""
    columns = ["plan", "context", "batch", "live", "predicted", "float16", "ratio", "in use before", "peak"]
    columns += ["own cache: in use before", "own cache: peak"]
    rows = [
        [
            result.method,
            f"{row.context:,}",
            str(row.batch),
            _megabytes(row.bytes_live),
            _megabytes(row.bytes_predicted),
            _megabytes(row.bytes_fp16),
            f"{row.ratio:.3g}",
            _megabytes(row.base_bytes),
            _megabytes(row.peak_bytes),
            _megabytes(row.base_bytes_reference),
            _megabytes(row.peak_bytes_reference),
        ]
        for result in results
        for row in result.rows
    ]
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    kind = "synthetic: random vectors and widths, no model" if results[0].synthetic else f"{results[0].dtype} model"
    title = f"memory in MB of {results[0].model} ({kind})"
    return Rows(title, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"


def speed_table(results: Sequence[SpeedResult]) -> Rows:
    """Times beside the model's own cache, with the spread over repeats; on a CPU ratios alone."""
    first = results[0]
    columns, rows = speed_columns(results)
    where = "" if first.absolute else f", {first.threads} threads: only ratios mean anything on a CPU"
    return Rows(f"speed of {first.model} on {first.device}, median of {first.repeats}{where}", columns, rows)


def speed_memory_table(results: Sequence[SpeedResult]) -> Rows:
    """Device memory of whole decode steps, in MB, beside weights and the byte law."""
    columns, rows = memory_columns(results)
    return Rows(f"memory in MB of decoding with {results[0].model} on {results[0].device}", columns, rows)


def benchmark_table(results: Sequence[BenchmarkResult]) -> Rows:
    """One row per subtask and context, one column per cache; a star where a score is not within 2 errors of fp16's."""
    reference = next((result for result in results if result.plan is None), None)
    places = list(dict.fromkeys(row.place for result in results for row in result.rows))
    columns = ["subtask", "context", "samples", *(result.method for result in results)]
    rows = []
    for subtask, context, metric in places:
        found = [_benchmark_row(result, (subtask, context, metric)) for result in results]
        base = _benchmark_row(reference, (subtask, context, metric)) if reference else None
        samples = "/".join(dict.fromkeys(str(row.samples) for row in found if row))
        rows.append([subtask, str(context or ""), samples, *(_benchmark_score(row, base) for row in found)])
    contexts = list(dict.fromkeys(context for _, context, _ in places))
    for context in contexts:
        scores = [[row.score for row in result.rows if row.context == context] for result in results]
        if len({len(values) for values in scores}) == 1 and len(scores[0]) > 1:
            rows.append(["mean", str(context or ""), "", *(f"{100 * fmean(values):.1f}" for values in scores)])
    title = f"{results[0].benchmark}: score in % ± standard error"
    return Rows(title + (", * beyond 2 errors of fp16" if reference else ""), columns, rows)


def _benchmark_row(result: BenchmarkResult, place: tuple[str, int | None, str]) -> BenchmarkRow | None:
    return next((row for row in result.rows if row.place == place), None)


def _benchmark_score(row: BenchmarkRow | None, base: BenchmarkRow | None) -> str:
    if row is None:
        return ""
    error = "" if row.stderr is None else f" ± {100 * row.stderr:.1f}"
    apart = base is not None and base is not row and indistinguishable(row, base) is False
    return f"{100 * row.score:.1f}{error}{' *' if apart else ''}"


def stability_table(results: Sequence[StabilityResult]) -> Rows:
    """KL of every recipe at every budget by the Stats it was calibrated on, with what their gradients foretell."""
    return Rows("stability", list(COLUMNS), stability_rows(results))


_KINDS: dict[str, tuple[type[Measurement], Callable[..., Rows]]] = {
    "memory": (MemoryResult, memory_table),
    "speed": (SpeedResult, speed_table),
    "benchmark": (BenchmarkResult, benchmark_table),
    "stability": (StabilityResult, stability_table),
}
