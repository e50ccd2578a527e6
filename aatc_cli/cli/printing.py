"""What commands print on stdout: a table for people, or one JSON document with --json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import typer

from aatc_cli.artifacts.evaluation import Evaluation, Measurement
from aatc_cli.console import print_json, print_table
from aatc_cli.evals.benchmark import BenchmarkResult
from aatc_cli.evals.memory import MemoryResult
from aatc_cli.evals.speed import SpeedResult
from aatc_cli.evals.stability import StabilityResult
from aatc_cli.stages.result_tables import (
    Rows,
    benchmark_table,
    memory_table,
    speed_memory_table,
    speed_table,
    stability_table,
)

M = TypeVar("M", bound=Measurement)


def print_artifact(path: Path, digest: str, json: bool) -> None:
    """Where an artifact was written, and its digest."""
    if json:
        print_json({"path": str(path), "digest": digest})
    else:
        typer.echo(f"{path} {digest}")


def print_evaluations(results: list[Evaluation], json: bool) -> None:
    """Evaluations as one table; columns that nothing in it measured are left out."""
    if json:
        print_json([evaluation.model_dump(mode="json") for evaluation in results])
        return
    columns = ["method", "text", "bits", "packed bits", "ratio", "KL (nats)", "KL p99", "top-1"]
    columns += ["NLL (nats)", "perplexity"]
    rows = []
    for e in results:
        method = e.recipe if e.budget is None else f"{e.recipe}-{e.budget}"
        packed = "" if e.bits_packed is None else f"{e.bits_packed:.4g}"
        sizes = [f"{e.bits:.4g}", packed, f"{e.ratio:.4g}"]
        pairs = ((e.kl_mean, e.kl_stderr), (e.kl_p99, None), (e.top1, e.top1_stderr), (e.nll, e.nll_stderr))
        perplexity = _with_error(e.perplexity, e.perplexity_stderr)
        rows.append([method, e.text, *sizes, *(_with_error(*pair) for pair in pairs), perplexity])
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    columns, rows = [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]
    if any(e.distortion for e in results):
        columns = ["plan", "side", "bits", "layers", "measured / predicted: min", "median", "max"]
        rows = [row for e in results for row in _distortion_rows(e)]
    print_table("evaluations", columns, rows)


def _with_error(mean: float | None, stderr: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.3g}" if stderr is None else f"{mean:.3g} ± {stderr:.2g}"


def _distortion_rows(evaluation: Evaluation) -> list[list[str]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for row in evaluation.distortion or []:
        label = "plan" if row.plan else f"{row.bits:g}"
        groups.setdefault((row.side, label), []).append(row.measured / row.predicted if row.predicted else float("nan"))
    name = f"{evaluation.recipe}-{evaluation.budget}"
    return [
        [name, side, label, str(len(v)), f"{min(v):.3g}", f"{median(v):.3g}", f"{max(v):.3g}"]
        for (side, label), v in sorted(groups.items())
    ]


def print_benchmarks(results: list[BenchmarkResult], json: bool) -> None:
    """Scores of the same benchmark with several caches."""
    _print(results, benchmark_table, json)


def print_memory(results: list[MemoryResult], json: bool) -> None:
    """Bytes of the caches of several plans."""
    _print(results, memory_table, json)


def print_speed(results: list[SpeedResult], json: bool) -> None:
    """Times of the caches of several plans, and the memory of whole decode steps where that was measured."""
    _print(results, speed_table, json)
    if not json and any(result.memory for result in results):
        print_table(*speed_memory_table(results))


def print_stability(results: list[StabilityResult], json: bool) -> None:
    """How far plans depend on what they were calibrated on."""
    _print(results, stability_table, json)


def _print(results: Sequence[M], table: Callable[[Sequence[M]], Rows], json: bool) -> None:
    if json:
        print_json([result.model_dump(mode="json") for result in results])
    else:
        print_table(*table(results))
