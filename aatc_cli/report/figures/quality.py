"""Figure of quality: KL over packed bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.report.figures.axes import grid, legend, look, rows_of_panels, title
from aatc_cli.report.figures.style import FULL_WIDTH, draw, log_axis
from aatc_cli.report.series.quality import QualityPanel


def quality_figure(panels: Sequence[QualityPanel], name: str = "quality") -> str:
    """KL (log) against packed bits with standard errors: a panel per protocol, a line per recipe.

    ``name`` prefixes the ids of the figure.
    """

    def paint(figure: Any) -> None:
        axes = grid(figure, len(panels))
        for panel, ax in zip(panels, axes, strict=True):
            for line in panel.lines:
                error = [e or 0.0 for e in line.error]
                colour, marker = look(line.recipe)
                ax.errorbar(
                    line.x, line.y, error, color=colour, marker=marker, capsize=2.5, elinewidth=1.0, label=line.label
                )
            ax.set_yscale("log", nonpositive="clip")
            log_axis(ax.yaxis)
            title(ax, panel.title, len(axes[:2]))
            ax.set(xlabel="packed bits per number", ylabel="KL (nats per token)")
        legend(figure, axes)

    told = (
        f"KL of {', '.join(dict.fromkeys(line.recipe for panel in panels for line in panel.lines))} over packed bits."
    )
    return draw(name, FULL_WIDTH, 0.4 + 3.0 * rows_of_panels(len(panels)), paint, "KL against packed bits", told)
