"""Figure of distortion: measured against predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.core import SIDES
from aatc_cli.report.figures.axes import grid, legend, rows_of_panels, title
from aatc_cli.report.figures.style import FULL_WIDTH, MUTED, SIDE_COLOUR, SIDE_NAME, draw, log_axis
from aatc_cli.report.series.distortion import Scatter


def distortion_figure(scatters: Sequence[Scatter]) -> str:
    """Measured against predicted distortion (log-log) by side, with the diagonal where both agree."""

    def paint(figure: Any) -> None:
        axes = grid(figure, len(scatters))
        for scatter, ax in zip(scatters, axes, strict=True):
            for plan, marker, kind in ((False, "o", "uniform width"), (True, "^", "plan")):
                for side in SIDES:
                    chosen = [p for p in scatter.points if p.side == side and p.plan == plan]
                    if chosen:
                        x, y = [p.predicted for p in chosen], [p.measured for p in chosen]
                        ax.plot(
                            x,
                            y,
                            marker,
                            ms=4.2,
                            color=SIDE_COLOUR[side],
                            alpha=0.75,
                            mew=0,
                            label=f"{SIDE_NAME[side]}, {kind}",
                        )
            ends = [value for p in scatter.points for value in (p.predicted, p.measured)]
            low, high = min(ends) / 1.6, max(ends) * 1.6
            ax.plot([low, high], [low, high], color=MUTED, lw=1.0, zorder=1, label="measured = predicted")
            ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
            for axis in (ax.xaxis, ax.yaxis):
                log_axis(axis)
            title(ax, scatter.title, len(axes[:2]))
            ax.set(xlabel="predicted (relative to the output)", ylabel="measured")
        legend(figure, axes, columns=3)

    width, height = FULL_WIDTH if len(scatters) > 1 else 5.6, 0.7 + 4.0 * rows_of_panels(len(scatters))
    told = "One mark per layer and side; on the diagonal the prediction is exact."
    return draw("distortion", width, height, paint, "Predicted against measured distortion", told)
