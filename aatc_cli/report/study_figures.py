"""The figures of a study: KL against packed bits, scores against bits, scores against context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aatc_cli.report.compare import Figure
from aatc_cli.report.figures import grid, legend, look, rows_of_panels
from aatc_cli.report.groups import Protocol
from aatc_cli.report.series import Line, QualityPanel
from aatc_cli.report.study_data import StudyView, kl_figure, title_of
from aatc_cli.report.study_tables import Column, score_columns
from aatc_cli.report.svg import FULL_WIDTH, MUTED, draw


@dataclass(frozen=True)
class ScorePanel:
    """Scores in percent of several lines. ``reference``: of the uncompressed cache, drawn across."""

    title: str
    lines: tuple[Line, ...]
    reference: float | None = None


def kl_panels(view: StudyView) -> list[QualityPanel]:
    """KL of every method over its packed bits: a panel per text and windows, where a method has two points."""
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
        lines = tuple(_line(label, points) for label, points in found[protocol].items())
        curves = [line for line in lines if len(line.x) > 1]
        if curves:
            # a method of one width far from all others would only stretch the axis: it is in the table
            widest = max(max(line.x) for line in curves)
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
        drawn = tuple(_line(label, points, 100) for label, points in lines.items() if len(points) > 1)
        if drawn:
            panels.append(ScorePanel(column.title, drawn, _reference(view, column)))
    return panels


def context_panels(view: StudyView) -> list[ScorePanel]:
    """RULER's mean score over context, a line per method and budget, where there are two contexts or more."""
    columns = [column for column in score_columns(view) if column.key.startswith("ruler ")]
    lines = []
    for row in view.result.rows:
        points = [
            (float(column.key.split()[1]), column.figures[row.name]) for column in columns if row.name in column.figures
        ]
        if len(points) > 1:
            lines.append(_line(title_of(row), points, 100))
    return [ScorePanel("RULER", tuple(lines))] if lines else []


def score_figure(panels: Sequence[ScorePanel], name: str, across: str) -> str:
    """Scores with standard errors: a panel per benchmark, a line per method; ``across`` names the horizontal axis."""
    labels = list(dict.fromkeys(line.recipe for panel in panels for line in panel.lines))

    def paint(figure: Any) -> None:
        axes = grid(figure, len(panels))
        for panel, ax in zip(panels, axes, strict=True):
            for line in panel.lines:
                colour, marker = look(labels.index(line.recipe))
                errors = [error or 0.0 for error in line.error]
                ax.errorbar(
                    line.x, line.y, errors, color=colour, marker=marker, capsize=2.5, elinewidth=1.0, label=line.recipe
                )
            if panel.reference is not None:
                ax.axhline(panel.reference, color=MUTED, lw=1.0, ls=(0, (5, 2)), label="fp16")
            ax.set(title=panel.title, xlabel=across, ylabel="score in %")
            if across.startswith("context"):
                ticks = sorted({x for line in panel.lines for x in line.x})
                ax.set_xscale("log", base=2)
                ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        legend(figure, axes)

    return draw(name, FULL_WIDTH if len(panels) > 1 else 5.6, 0.4 + 3.0 * rows_of_panels(len(panels)), paint)


def _reference(view: StudyView, column: Column) -> float | None:
    for row in view.result.rows:
        if row.budget is None and row.reason is None and row.name in column.figures:
            return 100 * column.figures[row.name].mean
    return None


def _line(label: str, points: Sequence[tuple[float, Figure]], scale: float = 1.0) -> Line:
    """Points in rising order of x, means and errors times ``scale``."""
    ordered = sorted(points, key=lambda point: point[0])
    errors = tuple(None if figure.stderr is None else scale * figure.stderr for _, figure in ordered)
    return Line(label, tuple(x for x, _ in ordered), tuple(scale * figure.mean for _, figure in ordered), errors)
