"""The scores of a study by benchmark, and its lines: KL over packed bits, scores over bits and over context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.study import StudyCell
from aatc_cli.core.compare import Figure
from aatc_cli.report.data.protocols import Protocol
from aatc_cli.report.data.study import AVERAGED, StudyView, title_of
from aatc_cli.report.series.quality import Line, QualityPanel
from aatc_cli.report.series.samples import kl_figure, score_figure

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


@dataclass(frozen=True)
class ScorePanel:
    """Scores in percent of several lines. ``reference``: of the uncompressed cache, drawn across."""

    title: str
    lines: tuple[Line, ...]
    reference: float | None = None


def kl_panels(view: StudyView) -> list[QualityPanel]:
    """KL of every method over its packed bits: a panel per text and windows, where there are two points."""
    found: dict[Protocol, dict[str, list[tuple[float, Figure]]]] = {}
    references: dict[Protocol, float] = {}
    rows = {row.name: row for row in view.result.rows}
    for cell in view.cells("kl"):
        e, row = view.window(cell), rows.get(cell.row)
        figure = kl_figure(e) if e else None
        if e is None or row is None or figure is None:
            continue
        if row.budget is None:
            references[Protocol.of(e)] = figure.mean
        elif row.bits_packed is not None and figure.mean > 0:
            found.setdefault(Protocol.of(e), {}).setdefault(row.label, []).append((row.bits_packed, figure))
    panels = []
    for protocol in sorted(found):
        lines = tuple(Line.of(label, points) for label, points in found[protocol].items())
        curves = [line for line in lines if len(line.x) > 1]
        if sum(len(line.x) for line in lines) > 1:
            # a method of one width far from all others would only stretch the axis: it is in the table
            widest = max(max(line.x) for line in curves or lines)
            lines = tuple(line for line in lines if max(line.x) <= widest)
            title = f"{protocol.text}, {protocol.windows} x {protocol.length} tokens"
            panels.append(QualityPanel(title, lines, references.get(protocol)))
    return panels


def sweep_panels(view: StudyView) -> list[ScorePanel]:
    """Scores over bits per channel: a panel per benchmark, a line per method with two budgets or more."""
    panels = []
    for column in score_columns(view):
        lines: dict[str, list[tuple[float, Figure]]] = {}
        for row in view.result.rows:
            figure = column.figures.get(row.name)
            if figure is not None and row.budget is not None and row.bits is not None:
                lines.setdefault(row.label, []).append((row.bits, figure))
        drawn = tuple(Line.of(label, points, 100) for label, points in lines.items() if len(points) > 1)
        if drawn:
            panels.append(ScorePanel(column.title, drawn, _reference(view, column)))
    return panels


def context_panels(view: StudyView) -> list[ScorePanel]:
    """RULER's mean score over context, a line per method and budget, where there are two contexts or more."""
    columns = [c for c in score_columns(view) if c.key.startswith("ruler ") and c.key.split()[-1].isdigit()]
    lines = []
    for row in view.result.rows:
        points = [
            (float(column.key.split()[1]), column.figures[row.name]) for column in columns if row.name in column.figures
        ]
        if len(points) > 1:
            lines.append(Line.of(row.label, points, 100, title_of(row)))
    return [ScorePanel("RULER", tuple(lines))] if lines else []


def score_columns(view: StudyView) -> list[Column]:
    """One column per benchmark: LongBench averaged, RULER by context, MMLU-Pro by subject."""
    columns: list[Column] = []
    if view.cells("longbench"):
        averaged = _column(view, "LongBench avg.", "longbench", "longbench", subtasks=AVERAGED)
        columns.append(averaged)
    for context, mode in dict.fromkeys((cell.context, cell.mode) for cell in view.cells("ruler")):
        forced = f" {mode}" if mode else ""
        columns.append(_column(view, f"RULER {context}{forced}", f"ruler {context}{forced}", "ruler", (context, mode)))
    columns += [_column(view, _NAMES[task], task, task) for task in ("gsm8k", "math-500") if view.cells(task)]
    if view.cells("mmlu-pro"):
        columns += [
            _column(view, _NAMES[f"mmlu-pro {subject}"], f"mmlu-pro {subject}", "mmlu-pro", subtasks=(subject,))
            for subject in ("math", "computer_science")
        ]
    return columns


def subtask_columns(view: StudyView, task: str, context: int | None, mode: str | None = None) -> list[Column]:
    """One column per subtask of LongBench, or of RULER at a context."""
    cells = [cell for cell in view.cells(task) if (cell.context, cell.mode) == (context, mode)]
    names = dict.fromkeys(row.subtask for cell in cells for row in view.benchmark_rows(cell))
    place = " ".join(str(part) for part in (task, context, mode) if part is not None)
    return [_column(view, name, f"{place} {name}", task, (context, mode), (name,)) for name in names]


def _column(
    view: StudyView,
    title: str,
    key: str,
    task: str,
    place: tuple[int | None, str | None] = (None, None),
    subtasks: Sequence[str] = (),
) -> Column:
    """Scores of a task averaged over ``subtasks`` (all if none), for the methods that have all of them.

    place: context and mode.
    """
    cells = {cell.row: cell for cell in view.cells(task) if (cell.context, cell.mode) == place}
    figures: dict[str, Figure] = {}
    for name, cell in cells.items():
        rows = [row for row in view.benchmark_rows(cell) if not subtasks or row.subtask in subtasks]
        figure = score_figure(rows)
        if figure is not None:
            figures[name] = figure
    return Column(title, key, cells, figures)


def _reference(view: StudyView, column: Column) -> float | None:
    for row in view.result.rows:
        if row.budget is None and row.reason is None and row.name in column.figures:
            return 100 * column.figures[row.name].mean
    return None
