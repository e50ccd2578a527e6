"""The tables of a study: KL and perplexity by packed bits, the main table, scores by subtask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.study import StudyCell, StudyRow
from aatc_cli.report.compare import Figure, tied
from aatc_cli.report.groups import Protocol
from aatc_cli.report.study_data import AVERAGED, StudyView, kl_figure, score_figure, title_of
from aatc_cli.report.tables import MISSING, Cell, Table, number, percent_with_error, signed, spread

TIE = "≈"
TIE_NOTE = (
    f"{TIE} not to be told from the best in bold: within two standard errors of the difference, taken sample by sample "
    "where both saw the same samples and those are kept, else from both errors."
)
RATE_NOTE = (
    "Packed bits: what a number of a packed token takes with scales, padding and all else that goes with it; rows "
    "are grouped, and the best found, by their nearest half bit."
)
SIMULATED_NOTE = "simulated: codes are decoded at once into an ordinary cache; bytes are the byte law's."
_NAMES = {
    "mmlu-pro math": "MMLU-Pro math",
    "mmlu-pro computer_science": "MMLU-Pro computer science",
    "gsm8k": "GSM8K",
    "math-500": "MATH-500",
}


@dataclass(frozen=True)
class Column:
    """One column of scores: what it is called, its key among published figures, and its rows by method."""

    title: str
    key: str
    cells: dict[str, StudyCell]
    figures: dict[str, Figure]


def window_tables(view: StudyView) -> list[Table]:
    """One table per task, text and windows; the lowest KL (or perplexity) of every half bit is in bold."""
    found: dict[tuple[str, str | None, int | None], list[StudyCell]] = {}
    for task in ("kl", "perplexity"):
        for cell in view.cells(task):
            found.setdefault((task, cell.text, cell.length), []).append(cell)
    tables: list[Table] = []
    for cells in found.values():
        protocols = {Protocol.of(e) for cell in cells if (e := view.window(cell)) is not None}
        tables += [_window_table(view, cells, protocol) for protocol in sorted(protocols)]
        if not protocols:
            tables.append(_window_table(view, cells, None))
    return tables


def rate_of(row: StudyRow) -> float:
    """The group a row is compared in: its packed bits to the nearest half bit."""
    return math.floor(2 * (row.bits_packed or 0.0) + 0.5) / 2


def _window_table(view: StudyView, cells: Sequence[StudyCell], protocol: Protocol | None) -> Table:
    """Rows of one protocol; methods without an evaluation are listed under the first of a text's tables."""
    by_row = {cell.row: cell for cell in cells}
    values = {name: view.window(cell) for name, cell in by_row.items()}
    shown = {name: e for name, e in values.items() if e is not None and Protocol.of(e) == protocol}
    rows = sorted((row for row in view.result.rows if row.name in shown), key=lambda row: -rate_of(row))
    perplexity = cells[0].task == "perplexity"
    figures: dict[str, Figure] = {}
    for name, e in shown.items():
        figure = Figure(e.perplexity, e.perplexity_stderr, {}) if e.perplexity is not None else kl_figure(e)
        if figure is not None:
            figures[name] = figure
    marks: dict[str, str] = {}
    for rate in {rate_of(row) for row in rows}:
        members = {
            row.name: figures[row.name]
            for row in rows
            if rate_of(row) == rate and row.budget is not None and row.name in figures
        }
        marks |= _marks(members, min)
    whole = f"bits at {cells[0].length} tokens"
    columns = ("method", "bits", "packed bits", whole, "KL (nats)", "top-1", "ΔNLL", "perplexity")
    lines, rules = [], set()
    for index, row in enumerate(rows):
        e = shown[row.name]
        if index and rate_of(row) != rate_of(rows[index - 1]):
            rules.add(index)
        strong, tie = marks.get(row.name) == "best", f" {TIE}" if marks.get(row.name) == "tie" else ""
        nll, reference = e.nll, e.nll_reference
        # positions scored by KL have a likelihood too: the perplexity of the text from there on
        likely = spread(e.perplexity, e.perplexity_stderr) if perplexity else number(nll and math.exp(nll))
        lines.append(
            (
                Cell(title_of(row)),
                Cell(number(row.bits)),
                Cell(number(row.bits_packed)),
                Cell(number(e.bits_at_context)),
                Cell(spread(e.kl_mean, e.kl_stderr) + ("" if perplexity else tie), strong and not perplexity),
                Cell(percent_with_error(e.top1, e.top1_stderr)),
                Cell(signed(None if nll is None or reference is None else nll - reference)),
                Cell(likely + (tie if perplexity else ""), strong and perplexity),
            )
        )
    kept = [i for i in range(len(columns)) if any(line[i].text != MISSING for line in lines)]
    notes = [RATE_NOTE, TIE_NOTE]
    if any(row.simulated for row in rows):
        notes.append(SIMULATED_NOTE)
    notes += _missing_notes(view, [cell for name, cell in by_row.items() if values[name] is None])
    caption = f"{cells[0].task} on {protocol.describe()}" if protocol else cells[0].column
    return Table(
        caption,
        tuple(columns[i] for i in kept),
        tuple(tuple(line[i] for i in kept) for line in lines),
        tuple(notes),
        frozenset(rules),
    )


def main_table(view: StudyView) -> Table | None:
    """The paper's main table: methods by benchmarks, the best compressed score of each in bold; None without any."""
    return _score_table(view, "Benchmarks: score in %", score_columns(view))


def subtask_tables(view: StudyView) -> list[Table]:
    """Scores by subtask, of LongBench and of RULER at every context."""
    tables: list[Table | None] = []
    for task, context in dict.fromkeys((cell.task, cell.context) for cell in view.result.cells):
        if task in ("longbench", "ruler"):
            title = "LongBench" if task == "longbench" else f"RULER at {context} tokens"
            tables.append(_score_table(view, f"{title} by subtask: score in %", _subtask_columns(view, task, context)))
    return [table for table in tables if table is not None]


def score_columns(view: StudyView) -> list[Column]:
    """One column per benchmark: LongBench averaged, RULER by context, MMLU-Pro by subject."""
    columns: list[Column] = []
    if view.cells("longbench"):
        averaged = _column(view, "LongBench avg.", "longbench", "longbench", None, AVERAGED)
        columns.append(averaged)
    for context in dict.fromkeys(cell.context for cell in view.cells("ruler")):
        columns.append(_column(view, f"RULER {context}", f"ruler {context}", "ruler", context))
    columns += [_column(view, _NAMES[task], task, task) for task in ("gsm8k", "math-500") if view.cells(task)]
    if view.cells("mmlu-pro"):
        columns += [
            _column(view, _NAMES[f"mmlu-pro {subject}"], f"mmlu-pro {subject}", "mmlu-pro", None, (subject,))
            for subject in ("math", "computer_science")
        ]
    return columns


def _subtask_columns(view: StudyView, task: str, context: int | None) -> list[Column]:
    cells = [cell for cell in view.cells(task) if cell.context == context]
    names = dict.fromkeys(row.subtask for cell in cells for row in view.benchmark_rows(cell))
    place = task if context is None else f"{task} {context}"
    return [_column(view, name, f"{place} {name}", task, context, (name,)) for name in names]


def _column(
    view: StudyView, title: str, key: str, task: str, context: int | None = None, subtasks: Sequence[str] = ()
) -> Column:
    """Scores of a task averaged over ``subtasks`` (all if none), for the methods that have all of them."""
    cells = {cell.row: cell for cell in view.cells(task) if cell.context == context}
    figures: dict[str, Figure] = {}
    for name, cell in cells.items():
        rows = [row for row in view.benchmark_rows(cell) if not subtasks or row.subtask in subtasks]
        figure = score_figure(rows)
        if figure is not None:
            figures[name] = figure
    return Column(title, key, cells, figures)


def _score_table(view: StudyView, caption: str, columns: Sequence[Column]) -> Table | None:
    if not columns:
        return None
    named = {name for column in columns for name in column.cells}
    rows = [row for row in view.result.rows if row.name in named]
    by_name = {row.name: row for row in rows}
    marks = [
        _marks({n: f for n, f in column.figures.items() if n in by_name and by_name[n].budget is not None}, max)
        for column in columns
    ]
    footnotes: dict[str, int] = {}
    bracketed = False
    lines = []
    for row in rows:
        ratio = MISSING if row.ratio is None else f"{row.ratio:.2f}"
        line = [Cell(title_of(row)), Cell(number(row.bits_packed)), Cell(ratio)]
        for column, marked in zip(columns, marks, strict=True):
            known = view.published if not row.stats else None
            paper = known.score(row.recipe, row.budget, column.key) if known else None
            beside = "" if paper is None else f" [{100 * paper:.1f}]"
            bracketed |= paper is not None
            figure, mark = column.figures.get(row.name), marked.get(row.name)
            if figure is None:
                reason = view.reason(column.cells.get(row.name))
                text = f"missing ({footnotes.setdefault(reason, len(footnotes) + 1)})"
            else:
                text = percent_with_error(figure.mean, figure.stderr).removesuffix(" %")
                text += f" {TIE}" if mark == "tie" else ""
            line.append(Cell(text + beside, mark == "best"))
        lines.append(tuple(line))
    notes = [TIE_NOTE] if any("tie" in marked.values() for marked in marks) else []
    notes += [SIMULATED_NOTE] if any(row.simulated for row in rows) else []
    if bracketed and view.published:
        notes.append(f"In brackets: {view.published.source}.")
    notes += [f"({place}) {reason}" for reason, place in footnotes.items()]
    titles = ("method", "packed bits", "ratio at 8192 tokens", *(column.title for column in columns))
    return Table(caption, titles, tuple(lines), tuple(notes))


def _marks(figures: dict[str, Figure], better: Callable[..., str]) -> dict[str, str]:
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


def _missing_notes(view: StudyView, cells: Sequence[StudyCell]) -> list[str]:
    """One note per reason with the methods it holds for."""
    titles = {row.name: row.name for row in view.result.rows}
    found: dict[str, list[str]] = {}
    for cell in cells:
        found.setdefault(view.reason(cell), []).append(titles.get(cell.row, cell.row))
    return [f"missing: {', '.join(names)}: {reason}" for reason, names in found.items()]
