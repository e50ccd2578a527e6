"""The tables of a study: KL and perplexity by packed bits, the main table, scores by subtask."""

from __future__ import annotations

import math
from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.artifacts.study import StudyCell, StudyRow
from aatc_cli.core.compare import Figure, difference
from aatc_cli.evals import find_task
from aatc_cli.evals.rows import Rows
from aatc_cli.report.blocks import Cell, Table
from aatc_cli.report.data.protocols import Protocol, apart_notes
from aatc_cli.report.data.study import StudyView, title_of
from aatc_cli.report.series.samples import kl_figure, nll_change, nll_figure
from aatc_cli.report.series.studies import Column, score_columns, subtask_columns
from aatc_cli.report.tables.scores import INTERVAL_NOTE, TIE, TIE_NOTE, marks_of, score_text
from aatc_cli.report.text import MISSING, change, number, percent_with_error, spread

# tasks of a study that are neither KL on windows nor one score of a benchmark
_OWN_TABLES = ("recall", "accumulate", "turns", "references")
RATE_NOTE = (
    "Packed bits: what a number of a packed token takes with scales, padding and all else that goes with it; rows "
    "are grouped, and the best found, by their nearest half bit."
)
BEHIND_NOTE = "above the best: of its half bit, in nats, with the standard error of the difference itself."
SIMULATED_NOTE = "simulated: codes are decoded at once into an ordinary cache; bytes are the byte law's."


def window_tables(view: StudyView) -> list[Table]:
    """One table per task, text and windows; the lowest KL (or perplexity) of every half bit is in bold."""
    found: dict[str, list[StudyCell]] = {}
    for task in ("kl", "perplexity"):
        for cell in view.cells(task):
            found.setdefault(cell.column, []).append(cell)
    tables: list[Table] = []
    for cells in found.values():
        protocols = sorted({Protocol.of(e) for cell in cells if (e := view.window(cell)) is not None})
        for protocol, apart in zip(protocols, apart_notes(protocols), strict=True):
            tables.append(_window_table(view, cells, protocol, apart))
        if not protocols:
            tables.append(Table(cells[0].column, ("method",), (), tuple(_missing_notes(view, cells))))
    return tables


def task_tables(view: StudyView) -> list[Table]:
    """What cells of other tasks hold, in those tasks' own tables; their rows are methods at their budgets."""
    tables = []
    for name in _OWN_TABLES:
        results = view.measured(name)
        if results:
            made: list[Rows] = find_task(name).part("table", "tables")(results)
            tables += [Table.plain(rows.title, tuple(rows.columns), rows.rows) for rows in made]
    return tables


def rate_of(row: StudyRow) -> float:
    """The group a row is compared in: its packed bits to the nearest half bit."""
    return math.floor(2 * (row.bits_packed or 0.0) + 0.5) / 2


def _window_table(view: StudyView, cells: Sequence[StudyCell], protocol: Protocol, apart: tuple[str, ...]) -> Table:
    """Rows of one protocol; methods without an evaluation are listed under the first of a text's tables."""
    values = {cell.row: view.window(cell) for cell in cells}
    shown = {name: e for name, e in values.items() if e is not None and Protocol.of(e) == protocol}
    rows = sorted((row for row in view.result.rows if row.name in shown), key=lambda row: -rate_of(row))
    perplexity = cells[0].task == "perplexity"
    figures = {name: f for name, e in shown.items() if (f := nll_figure(e) if perplexity else kl_figure(e)) is not None}
    marks, behind = _by_rate(rows, figures)
    whole = f"bits at {cells[0].length} tokens"
    names = ("method", "bits", "packed bits", whole, "KL (nats)", "above the best", "top-1", "ΔNLL", "perplexity")
    lines = [
        _window_cells(row, shown[row.name], marks.get(row.name), behind.get(row.name, MISSING), perplexity=perplexity)
        for row in rows
    ]
    rules = {i for i in range(1, len(rows)) if rate_of(rows[i]) != rate_of(rows[i - 1])}
    kept = [i for i in range(len(names)) if any(line[i].text != MISSING for line in lines)]
    notes = [*apart, RATE_NOTE, TIE_NOTE, *([BEHIND_NOTE] if behind else [])]
    if any(row.simulated for row in rows):
        notes.append(SIMULATED_NOTE)
    notes += _missing_notes(view, [cell for cell in cells if values[cell.row] is None])
    return Table(
        f"{cells[0].task} on {protocol.describe()}",
        tuple(names[i] for i in kept),
        tuple(tuple(line[i] for i in kept) for line in lines),
        tuple(notes),
        frozenset(rules),
    )


def _by_rate(rows: Sequence[StudyRow], figures: dict[str, Figure]) -> tuple[dict[str, str], dict[str, str]]:
    """By name of a row: best or tie of its half bit, and how far above the best of it, in words."""
    marks: dict[str, str] = {}
    behind: dict[str, str] = {}
    for rate in {rate_of(row) for row in rows}:
        members = [row.name for row in rows if rate_of(row) == rate and row.budget is not None and row.name in figures]
        found = marks_of({name: figures[name] for name in members}, min)
        marks |= found
        best = next((name for name, mark in found.items() if mark == "best"), None)
        for name in members:
            if best is not None and found.get(name) != "best":
                gap = difference(figures[name], figures[best])
                behind[name] = MISSING if gap is None else spread(gap.mean, gap.stderr)
    return marks, behind


def _window_cells(row: StudyRow, e: Evaluation, mark: str | None, behind: str, *, perplexity: bool) -> tuple[Cell, ...]:
    strong, tie = mark == "best", f" {TIE}" if mark == "tie" else ""
    nll = e.nll
    # positions scored by KL have a likelihood too: the perplexity of the text from there on
    likely = spread(e.perplexity, e.perplexity_stderr) if perplexity else number(nll and math.exp(nll))
    return (
        Cell(title_of(row)),
        Cell(number(row.bits)),
        Cell(number(row.bits_packed)),
        Cell(number(e.bits_at_context)),
        Cell(spread(e.kl_mean, e.kl_stderr) + ("" if perplexity else tie), strong and not perplexity),
        Cell(behind),
        Cell(percent_with_error(e.top1, e.top1_stderr)),
        Cell(change(*nll_change(e))),
        Cell(likely + (tie if perplexity else ""), strong and perplexity),
    )


def main_table(view: StudyView) -> Table | None:
    """The paper's main table: methods by benchmarks, the best compressed score of each in bold; None without any."""
    return _score_table(view, "Benchmarks: score in %", score_columns(view))


def subtask_tables(view: StudyView) -> list[Table]:
    """Scores by subtask, of LongBench and of RULER at every context."""
    tables: list[Table | None] = []
    for task, context, mode in dict.fromkeys((cell.task, cell.context, cell.mode) for cell in view.result.cells):
        if task in ("longbench", "ruler"):
            title = "LongBench" if task == "longbench" else f"RULER at {context} tokens{', forced' if mode else ''}"
            columns = subtask_columns(view, task, context, mode)
            tables.append(_score_table(view, f"{title} by subtask: score in %", columns))
    return [table for table in tables if table is not None]


def _score_table(view: StudyView, caption: str, columns: Sequence[Column]) -> Table | None:
    if not columns:
        return None
    named = {name for column in columns for name in column.cells}
    rows = [row for row in view.result.rows if row.name in named]
    plans = {row.name for row in rows if row.budget is not None}
    marks = [marks_of({n: f for n, f in column.figures.items() if n in plans}, max) for column in columns]
    footnotes: dict[str, int] = {}
    lines = []
    for row in rows:
        cells = [
            _score_cell(view, row, column, marked.get(row.name), footnotes)
            for column, marked in zip(columns, marks, strict=True)
        ]
        ratio = MISSING if row.ratio is None else f"{row.ratio:.2f}"
        lines.append((Cell(title_of(row)), Cell(number(row.bits_packed)), Cell(ratio), *cells))
    notes = [INTERVAL_NOTE] + ([TIE_NOTE] if any("tie" in marked.values() for marked in marks) else [])
    notes += [SIMULATED_NOTE] if any(row.simulated for row in rows) else []
    if view.published and any(_published(view, row, column) is not None for row in rows for column in columns):
        notes.append(f"In brackets: {view.published.source}.")
    notes += [f"({place}) {reason}" for reason, place in footnotes.items()]
    titles = ("method", "packed bits", "ratio at 8192 tokens", *(column.title for column in columns))
    return Table(caption, titles, tuple(lines), tuple(notes))


def _score_cell(view: StudyView, row: StudyRow, column: Column, mark: str | None, footnotes: dict[str, int]) -> Cell:
    """A score with the paper's beside it, or the number of the footnote that says why there is none."""
    paper = _published(view, row, column)
    beside = "" if paper is None else f" [{100 * paper:.1f}]"
    figure = column.figures.get(row.name)
    if figure is None:
        reason = view.reason(column.cells.get(row.name))
        return Cell(f"missing ({footnotes.setdefault(reason, len(footnotes) + 1)}){beside}")
    return Cell(score_text(figure) + (f" {TIE}" if mark == "tie" else "") + beside, mark == "best")


def _published(view: StudyView, row: StudyRow, column: Column) -> float | None:
    """The paper's score in this place; rows calibrated on Stats of their own have none."""
    return view.published.score(row.recipe, row.budget, column.key) if view.published and not row.stats else None


def _missing_notes(view: StudyView, cells: Sequence[StudyCell]) -> list[str]:
    """One note per reason with the methods it holds for."""
    titles = {row.name: row.name for row in view.result.rows}
    found: dict[str, list[str]] = {}
    for cell in cells:
        found.setdefault(view.reason(cell), []).append(titles.get(cell.row, cell.row))
    return [f"missing: {', '.join(names)}: {reason}" for reason, names in found.items()]
