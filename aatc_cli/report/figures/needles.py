"""Figure of needles: what was found by context and depth, a panel per cache."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Rectangle

from aatc_cli.report.figures.axes import title
from aatc_cli.report.figures.style import BAND, FULL_WIDTH, GRID, INK, MARKS, draw
from aatc_cli.report.series.needles import NeedleGroup, NeedleMap

_ACROSS = 3


def needle_figure(group: NeedleGroup, name: str) -> str:
    """Percent found in every cell, shaded by what was missed; depth downwards, as the text is read."""
    columns = min(_ACROSS, len(group.maps))
    rows = -(-len(group.maps) // columns)

    def paint(figure: Any) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for spare in axes[len(group.maps) :]:
            spare.remove()
        for place, (found, ax) in enumerate(zip(group.maps, axes, strict=False)):
            _panel(ax, found)
            title(ax, found.name, columns)
            if place % columns == 0:
                ax.set_ylabel("depth (%)")
            ax.set_xlabel("context (tokens)")

    height = rows * (0.85 + 0.24 * max(len(found.depths) for found in group.maps))
    width = FULL_WIDTH * (columns + 0.4) / (_ACROSS + 0.4)
    told = f"Needles found in percent at every depth of every context: {', '.join(found.name for found in group.maps)}."
    return draw(name, width, height, paint, "Needles found by context and depth", told)


def _panel(ax: Any, found: NeedleMap) -> None:
    for y, row in enumerate(found.heat):
        for x, share in enumerate(row):
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_shade(share), edgecolor=GRID, lw=0.6))
            text = "" if share is None else f"{100 * share:.0f}"
            ax.text(x, y, text, ha="center", va="center", size=8, color=INK)
    ax.set(xlim=(-0.5, len(found.contexts) - 0.5), ylim=(len(found.depths) - 0.5, -0.5))
    ax.set_xticks(range(len(found.contexts)), [str(context) for context in found.contexts])
    ax.set_yticks(range(len(found.depths)), [str(depth) for depth in found.depths])
    ax.tick_params(length=0)
    ax.grid(False)


def _shade(share: float | None) -> str:
    """Nothing missed is the ground; six shades up to nothing found."""
    if share is None or share >= 1:
        return BAND
    return MARKS[min(len(MARKS) - 1, int((1 - share) * len(MARKS)))]
