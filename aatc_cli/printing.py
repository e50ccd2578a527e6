"""What commands print on stdout: a table for people, or one JSON document with --json."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

import typer

from aatc_cli.console import print_json, print_table
from aatc_cli.evals.benchmark import BenchmarkResult, BenchmarkRow, indistinguishable
from aatc_cli.evals.memory import MemoryResult
from aatc_cli.evals.schema import Evaluation
from aatc_cli.evals.speed import REFERENCE, SpeedResult
from aatc_cli.stages.inspect import Inspection


def print_artifact(path: Path, digest: str, json: bool) -> None:
    """Where an artifact was written, and its digest."""
    if json:
        print_json({"path": str(path), "digest": digest})
    else:
        typer.echo(f"{path} {digest}")


def print_inspection(inspection: Inspection, json: bool) -> None:
    """The facts of an inspection."""
    if json:
        print_json(inspection.data)
        return
    for table in inspection.tables:
        print_table(table.title, table.columns, table.rows)


def print_evaluations(results: list[Evaluation], json: bool) -> None:
    """Evaluations as one table; columns that nothing in it measured are left out."""
    if json:
        print_json([evaluation.model_dump(mode="json") for evaluation in results])
        return
    columns = ["method", "text", "bits", "effective", "ratio", "KL (nats)", "KL p99", "top-1"]
    columns += ["NLL (nats)", "perplexity"]
    rows = []
    for e in results:
        method = e.recipe if e.budget is None else f"{e.recipe}-{e.budget}"
        sizes = [f"{value:.4g}" for value in (e.bits, e.bits_effective, e.ratio)]
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
    """One row per subtask and context, one column per cache; a star where a score is not within 2 errors of fp16's."""
    if json:
        print_json([result.model_dump(mode="json") for result in results])
        return
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
    print_table(title + (", * beyond 2 errors of fp16" if reference else ""), columns, rows)


def _benchmark_row(result: BenchmarkResult, place: tuple[str, int | None, str]) -> BenchmarkRow | None:
    return next((row for row in result.rows if row.place == place), None)


def _benchmark_score(row: BenchmarkRow | None, base: BenchmarkRow | None) -> str:
    if row is None:
        return ""
    error = "" if row.stderr is None else f" ± {100 * row.stderr:.1f}"
    apart = base is not None and base is not row and indistinguishable(row, base) is False
    return f"{100 * row.score:.1f}{error}{' *' if apart else ''}"


def print_memory(results: list[MemoryResult], json: bool) -> None:
    """Bytes of every plan's cache at every size, in MB; columns that nothing filled are left out."""
    if json:
        print_json([result.model_dump(mode="json") for result in results])
        return
    columns = ["plan", "context", "batch", "live", "predicted", "float16", "ratio", "in use before", "peak"]
    columns += ["own cache: in use before", "own cache: peak"]
    rows = [
        [
            result.method, f"{row.context:,}", str(row.batch), _megabytes(row.bytes_live),
            _megabytes(row.bytes_predicted), _megabytes(row.bytes_fp16), f"{row.ratio:.3g}",
            _megabytes(row.base_bytes), _megabytes(row.peak_bytes), _megabytes(row.base_bytes_reference),
            _megabytes(row.peak_bytes_reference),
        ]
        for result in results
        for row in result.rows
    ]  # fmt: skip
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    kind = "synthetic: random vectors and widths, no model" if results[0].synthetic else f"{results[0].dtype} model"
    title = f"memory in MB of {results[0].model} ({kind})"
    print_table(title, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"


def print_speed(results: list[SpeedResult], json: bool) -> None:
    """Times beside the model's own cache, with the spread over repeats; on a CPU ratios alone."""
    if json:
        print_json([result.model_dump(mode="json") for result in results])
        return
    first = results[0]
    columns = ["plan", "part", "context", "batch", "computed by", "time / own cache", "repeats", "milliseconds"]
    if any(row.bound_milliseconds for result in results for row in result.rows):
        columns.append("its bytes at the rate of the reference, ms")
    rows = [
        [
            result.method, row.part, f"{row.context:,}", str(row.batch), row.backend, f"{row.ratio:.3g}",
            f"{row.ratio_low:.3g} .. {row.ratio_high:.3g}",
            f"{row.milliseconds:.4g} ({row.milliseconds_low:.4g} .. {row.milliseconds_high:.4g})",
            *([f"{row.bound_milliseconds:.4g}"] if row.bound_milliseconds else []),
        ]
        for result in results
        for row in result.rows
    ]  # fmt: skip
    if not first.absolute:
        columns, rows = columns[:-1], [row[:-1] for row in rows if row[4] != REFERENCE]
    where = "" if first.absolute else f", {first.threads} threads: only ratios mean anything on a CPU"
    print_table(f"speed of {first.model} on {first.device}, median of {first.repeats}{where}", columns, rows)
