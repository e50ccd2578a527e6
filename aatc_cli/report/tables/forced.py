"""Tables of forced answers: what each cache finds, and how much less likely it makes the right answer than fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from aatc_cli.artifacts.study import StudyCell, StudyRow
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.report.blocks import Cell, Table
from aatc_cli.report.data.study import StudyView, title_of
from aatc_cli.report.text import MISSING, change

_SCORE_NOTE = (
    "Score in %, in parentheses the difference to fp16 on the same prompts ± its standard error, in points; behind a "
    "semicolon the number of prompts where a method had not all of fp16's, whose score and difference are of those. "
    "Mean over the subtasks that all rows have in full."
)
_NATS_NOTE = (
    "Log-probability of the right answer with fp16 minus that with the cache, on the same prompts ± standard error: "
    "how much less likely it is."
)
# a mean and its standard error
Gap = tuple[float, float | None]


@dataclass(frozen=True)
class _Asked:
    """Rows of one task at one context: by name of the study's row, and by subtask."""

    title: str
    found: dict[str, dict[str, BenchmarkRow]]
    base: dict[str, BenchmarkRow]


def forced_tables(view: StudyView) -> list[Table]:
    """For every column of forced answers that fp16 has: a table of scores, and one of log-probabilities in nats."""
    columns: dict[str, list[StudyCell]] = {}
    for cell in view.result.cells:
        columns.setdefault(cell.column, []).append(cell)
    tables = []
    for cells in columns.values():
        asked = _asked(view, cells)
        if asked is not None:
            tables += _tables(view, asked)
    return tables


def _asked(view: StudyView, cells: Sequence[StudyCell]) -> _Asked | None:
    """What the cells of a column hold, where it is forced answers and fp16 has them."""
    found = {
        cell.row: {row.subtask: row for row in view.benchmark_rows(cell) if row.logprobs and row.scores}
        for cell in cells
    }
    found = {name: rows for name, rows in found.items() if rows}
    plain = next((row.name for row in view.result.rows if row.budget is None and row.name in found), None)
    return None if plain is None else _Asked(cells[0].column, found, found[plain])


def _tables(view: StudyView, asked: _Asked) -> list[Table]:
    """Rows by falling rate, those of one half bit together."""
    rows = sorted((row for row in view.result.rows if row.name in asked.found), key=lambda row: -_rate(row))
    subtasks = [name for name in asked.base if any(name in asked.found[row.name] for row in rows if row.budget)]
    if not subtasks:
        subtasks = list(asked.base)
    # means are of the same prompts in every row, and the mean of one is itself
    shared = [name for name in subtasks if all(_whole(asked, row.name, name) for row in rows)]
    shared = shared if len(shared) > 1 else []
    scores = [_line(row, _score_cells(row, asked, subtasks, shared)) for row in rows]
    nats = [_line(row, _nats_cells(asked.found[row.name], asked.base, subtasks)) for row in rows if row.budget]
    rules = frozenset(i for i in range(1, len(rows)) if _rate(rows[i]) != _rate(rows[i - 1]))
    counts = sorted({asked.found[row.name][name].samples for row in rows for name in asked.found[row.name]})
    samples = f"{counts[0]} samples" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} samples"
    names = ("method", "packed bits", *subtasks)
    columns = (*names, "mean") if shared else names
    tables = [Table(f"{asked.title}: score, {samples}", columns, tuple(scores), (_SCORE_NOTE,), rules)]
    if nats:
        behind = frozenset(i - 1 for i in rules if i > 1)
        tables.append(Table(f"{asked.title}: nats lost", names, tuple(nats), (_NATS_NOTE,), behind))
    return tables


def _whole(asked: _Asked, row: str, subtask: str) -> bool:
    """Whether a row has as many samples of a subtask as fp16."""
    found = asked.found[row].get(subtask)
    return found is not None and found.samples >= asked.base[subtask].samples


def _rate(row: StudyRow) -> float:
    return math.floor(2 * (row.bits_packed or 0.0) + 0.5) / 2


def _line(row: StudyRow, cells: list[str]) -> tuple[Cell, ...]:
    bits = "16" if row.budget is None else f"{row.bits_packed or 0.0:.2f}"
    # no cache is filled, so whether one would be simulated says nothing
    return (Cell(title_of(row.model_copy(update={"simulated": False}))), Cell(bits), *(Cell(text) for text in cells))


def _score_cells(row: StudyRow, asked: _Asked, subtasks: list[str], shared: list[str]) -> list[str]:
    mine = asked.found[row.name]
    cells = []
    for name in subtasks:
        if name not in mine:
            cells.append(MISSING)
            continue
        ours, theirs = mine[name].scores or [], asked.base[name].scores or []
        # a method that went on longer than fp16 is shown on what both were asked
        count = min(len(ours), len(theirs))
        gap = None if row.budget is None else gap_of(ours, theirs)
        cells.append(_points(fmean(ours[:count]), gap, None if count == len(theirs) else count))
    if not shared:
        return cells
    gaps = [gap_of(mine[name].scores, asked.base[name].scores) for name in shared]
    whole = None if row.budget is None else mean_gap([gap for gap in gaps if gap is not None])
    return [*cells, _points(fmean(_common(mine[name], asked.base[name]) for name in shared), whole)]


def _common(row: BenchmarkRow, base: BenchmarkRow) -> float:
    """Mean score of a row over the samples that fp16 has."""
    return fmean((row.scores or [])[: base.samples])


def _nats_cells(mine: dict[str, BenchmarkRow], base: dict[str, BenchmarkRow], subtasks: list[str]) -> list[str]:
    cells = []
    for name in subtasks:
        gap = gap_of(base[name].logprobs, mine[name].logprobs) if name in mine else None
        cells.append(MISSING if gap is None else change(*gap))
    return cells


def gap_of(ours: Sequence[float] | None, others: Sequence[float] | None) -> Gap | None:
    """Mean of the differences of both over the samples that both have, and its standard error."""
    pairs = list(zip(ours or [], others or [], strict=False))
    return mean_and_stderr([a - b for a, b in pairs]) if pairs else None


def mean_gap(gaps: Sequence[Gap]) -> Gap | None:
    """The mean of independent differences, and its standard error."""
    if not gaps:
        return None
    errors = [error for _, error in gaps if error is not None]
    error = math.sqrt(sum(e * e for e in errors)) / len(gaps) if len(errors) == len(gaps) else None
    return fmean(mean for mean, _ in gaps), error


def _points(score: float, gap: Gap | None, fewer: int | None = None) -> str:
    """A score in percent, the difference in points, and the number of samples where it is not that of fp16."""
    if gap is None:
        return f"{100 * score:.1f}"
    # no minus before a zero
    mean = round(100 * gap[0], 1) + 0.0
    error = "" if gap[1] is None else f" ± {100 * gap[1]:.1f}"
    count = "" if fewer is None else f"; {fewer}"
    return f"{100 * score:.1f} ({'+' if mean > 0 else ''}{mean:.1f}{error}{count})"
