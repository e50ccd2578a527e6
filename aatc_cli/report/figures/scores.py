"""Figures of scores: over bits per channel, and over context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.report.figures.axes import MARKERS, grid, legend, look, rows_of_panels, title
from aatc_cli.report.figures.style import FULL_WIDTH, MUTED, draw
from aatc_cli.report.series.studies import ScorePanel


def score_figure(panels: Sequence[ScorePanel], name: str, across: str) -> str:
    """Scores with standard errors: a panel per benchmark, a line per method; ``across`` names the horizontal axis."""

    def paint(figure: Any) -> None:
        axes = grid(figure, len(panels))
        for panel, ax in zip(panels, axes, strict=True):
            for line in panel.lines:
                colour, marker = look(line.recipe)
                # several budgets of a recipe share its colour
                same = [other for other in panel.lines if other.recipe == line.recipe]
                marker = MARKERS[(MARKERS.index(marker) + same.index(line)) % len(MARKERS)]
                errors = [error or 0.0 for error in line.error]
                ax.errorbar(
                    line.x, line.y, errors, color=colour, marker=marker, capsize=2.5, elinewidth=1.0, label=line.label
                )
            if panel.reference is not None:
                ax.axhline(panel.reference, color=MUTED, lw=1.0, ls=(0, (5, 2)), label="fp16")
            title(ax, panel.title, len(axes[:2]))
            ax.set(xlabel=across, ylabel="score in %")
            if across.startswith("context"):
                ticks = sorted({x for line in panel.lines for x in line.x})
                ax.set_xscale("log", base=2)
                ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        legend(figure, axes)

    width, height = FULL_WIDTH if len(panels) > 1 else 5.6, 0.4 + 3.0 * rows_of_panels(len(panels))
    told = f"Scores of {', '.join(dict.fromkeys(line.recipe for panel in panels for line in panel.lines))}."
    return draw(name, width, height, paint, f"Scores against {across}", told)
