"""Scores in tables: their intervals, the best of a column and what cannot be told from it; benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aatc_cli.core.compare import Figure, tied
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.report.blocks import Cell, Table
from aatc_cli.report.data.run import paper_first
from aatc_cli.report.series.samples import score_figure, score_interval
from aatc_cli.report.text import MISSING, number, percent_with_error

TIE = "≈"
TIE_NOTE = (
    f"{TIE} not to be told from the best in bold at 95 %: by differences sample by sample where both saw the same "
    "samples and those are kept (hits and misses by McNemar's exact test, other samples by Student's t), else by two "
    "standard errors of both."
)
INTERVAL_NOTE = "In parentheses: 95 % interval of scores that are hits or misses (Wilson); ± is one standard error."


def score_text(figure: Figure) -> str:
    """A score in percent: of hits and misses with its interval, of others with the standard error."""
    ends = score_interval(figure)
    if ends is None:
        return percent_with_error(figure.mean, figure.stderr).removesuffix(" %")
    return f"{number(100 * figure.mean)} ({number(100 * ends[0])} to {number(100 * ends[1])})"


def marks_of(figures: Mapping[str, Figure], better: Callable[..., str]) -> dict[str, str]:
    """By name: best (all that share the best mean), or tie (not to be told from it); empty where all are alike."""
    if len({figure.mean for figure in figures.values()}) < 2:
        return {}
    best = better(figures, key=lambda name: figures[name].mean)
    found: dict[str, str] = {}
    for name, figure in figures.items():
        if figure.mean == figures[best].mean:
            found[name] = "best"
        elif tied(figure, figures[best]):
            found[name] = "tie"
    return found


def answer_tables(caption: str, results: Sequence[BenchmarkResult]) -> list[Table]:
    """One table per context: caches as rows, parts of the benchmark as columns, and their mean where all have all."""
    tables = []
    for context in sorted({row.context for result in results for row in result.rows}, key=lambda c: c or 0):
        title = caption if context is None else f"{caption}, {context} tokens"
        tables.append(_answers_at(title, results, context))
    return tables


def _answers_at(caption: str, results: Sequence[BenchmarkResult], context: int | None) -> Table:
    ordered = sorted(results, key=lambda r: (r.plan is not None, -r.bits, paper_first(r.recipe)))
    parts = list(dict.fromkeys(row.subtask for r in ordered for row in r.rows if row.context == context))
    columns: list[tuple[str, dict[str, Figure]]] = []
    for part in [(name,) for name in parts] + ([tuple(parts)] if len(parts) > 1 else []):
        figures = {}
        for result in ordered:
            rows = [row for row in result.rows if row.context == context and row.subtask in part]
            figure = score_figure(rows)
            if figure is not None and len(rows) == len(part):
                figures[result.file_name] = figure
        columns.append((part[0] if len(part) == 1 else "mean", figures))
    compressed = {r.file_name for r in ordered if r.plan is not None}
    marks = [marks_of({n: f for n, f in figures.items() if n in compressed}, max) for _, figures in columns]
    lines = []
    for r in ordered:
        line = [Cell(r.method + (" (simulated)" if r.simulated else "")), Cell(number(r.bits_packed))]
        for (_, figures), marked in zip(columns, marks, strict=True):
            figure, mark = figures.get(r.file_name), marked.get(r.file_name)
            text = MISSING if figure is None else score_text(figure) + (f" {TIE}" if mark == "tie" else "")
            line.append(Cell(text, mark == "best"))
        lines.append(tuple(line))
    notes = [INTERVAL_NOTE] + ([TIE_NOTE] if any("tie" in marked.values() for marked in marks) else [])
    left: dict[str, list[str]] = {}
    for r in ordered:
        for name, why in r.left_out.items():
            left.setdefault(f"{name}: {why}", []).append(r.method)
    notes += [f"left out ({', '.join(methods)}): {reason}" for reason, methods in left.items()]
    titles = ("method", "packed bits", *(title for title, _ in columns))
    return Table(caption, titles, tuple(lines), tuple(notes))
