"""Figures of plans: mean widths by layer, and the width of every channel."""

from __future__ import annotations

import re
from typing import Any

from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from aatc_cli.core import SIDES
from aatc_cli.report.figures.style import BAND, FULL_WIDTH, SIDE_COLOUR, SIDE_NAME, WIDTHS, draw
from aatc_cli.report.series.plans import BitMap, Widths

# boxes of the cells of one width, as matplotlib writes them: corner by corner, the first one again or closed
_CELLS = re.compile(r'(<g id="[^"]*cells-[kv]\d+">\s*<path d=")([^"]*)("[^>]*style=")([^"]*)"')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def widths_figure(widths: Widths, top: float, widest: int, name: str, *, legend: bool) -> str:
    """Mean bits per layer and side, protected layers shaded, beside the histogram of widths.

    ``top`` bits and ``widest`` are the ends of both axes, shared by all plans of a report so they can be compared.
    """

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1.25))
        if widths.protected:
            left.axvspan(-0.5, widths.protected - 0.5, color=BAND, lw=0, zorder=0)
        for shift, side in zip((-0.2, 0.2), SIDES, strict=True):
            colour, label = SIDE_COLOUR[side], SIDE_NAME[side]
            layers, counts = widths.layers[side], widths.histogram[side]
            share = [100.0 * count / sum(counts) for count in counts]
            left.bar([i + shift for i in range(len(layers))], layers, 0.4, color=colour, label=label, lw=0)
            right.bar([i + shift for i in range(len(share))], share, 0.4, color=colour, lw=0)
        left.set(title=widths.name, xlabel="layer", ylabel="mean bits", ylim=(0, 1.08 * top))
        left.set_xlim(-0.6, len(widths.layers["k"]) - 0.4)
        right.set(xlabel="width (bits)", ylabel="% of channels", xlim=(-0.6, widest + 0.6))
        for ax in (left, right):
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(False, axis="x")
        if legend:
            left.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1, handlelength=1.0)

    told = "Mean bits of keys and values in every layer, and the share of channels at each width."
    return draw(name, FULL_WIDTH, 1.75, paint, f"Widths of {widths.name}", told)


def bitmap_figure(bitmap: BitMap, widest: int, name: str, *, legend: bool) -> str:
    """The width of every channel: a row of cells per layer, keys beside values; widths from 0 to ``widest``."""

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for side, ax in zip(SIDES, axes, strict=True):
            for width in range(1, widest + 1):
                path = _cells(bitmap, side, width)
                if path is not None:
                    # the page draws cells without smoothing, or seams would show between layers
                    ax.add_patch(PathPatch(path, facecolor=_shade(width), lw=0, gid=f"cells-{side}{width}"))
            ax.set_facecolor(BAND)
            ax.set(xlim=(0, bitmap.channels), ylim=(bitmap.layers - 0.5, -0.5), xlabel="channel")
            ax.set_title(f"{bitmap.name}, {SIDE_NAME[side]}")
            ax.grid(False)
            ax.yaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("layer")
        if legend:
            last = min(widest, len(WIDTHS))
            names = [*map(str, range(last)), f"{last}" if last == widest else f"{last} or more"]
            handles = [Patch(facecolor=_shade(width), label=name) for width, name in enumerate(names)]
            figure.legend(
                handles=handles, loc="outside upper left", ncols=last + 1, handlelength=1.0, columnspacing=1.0
            )

    height = (0.3 if legend else 0.0) + 0.75 + 0.055 * min(max(bitmap.layers, 10), 40)
    told = (
        f"Bits of each of {bitmap.channels} channels in {bitmap.layers} layers, keys on the left, values on the right."
    )
    return _CELLS.sub(_compact, draw(name, FULL_WIDTH, height, paint, f"Bit map of {bitmap.name}", told))


def _compact(cells: re.Match[str]) -> str:
    """The same cells as one stroke a run, as wide as a row: a sixth of the text, which is most of a page of plans.

    Corners are rounded to a hundredth of a point and steps are between rounded ones, so nothing adds up.
    """
    boxes = []
    for box in cells[2].split("z"):
        corners = [round(100 * float(number)) for number in _NUMBER.findall(box)]
        if corners:
            left, top, right, _, _, bottom = corners[:6]
            boxes.append((top, bottom, left, right))
    found, row, at = [], None, 0
    for top, bottom, left, right in sorted(boxes):
        move = (
            f"M{_hundredths(left)} {_hundredths((top + bottom) // 2)}" if row != top else f"m{_hundredths(left - at)} 0"
        )
        found.append(f"{move}h{_hundredths(right - left)}")
        row, at = top, right
    wide = max((bottom - top for top, bottom, _, _ in boxes), default=0)
    style = cells[4].replace("fill:", "stroke:", 1)
    return f'{cells[1]}{found}{cells[3]}{style}; fill: none; stroke-width: {_hundredths(wide)}"'


def _hundredths(number: int) -> str:
    return f"{number / 100:.2f}".rstrip("0").rstrip(".")


def _shade(width: int) -> str:
    """The colour of a width, the same in every report: none is the ground, and all beyond the last look alike."""
    return BAND if width == 0 else WIDTHS[min(width, len(WIDTHS)) - 1]


def _cells(bitmap: BitMap, side: Any, width: int) -> Any:
    """All cells of one width as one path, neighbours in a layer together; None where there are none."""
    boxes = [
        (start, layer - 0.5, count)
        for layer, runs in enumerate(bitmap.runs[side])
        for start, count, found in runs
        if found == width
    ]
    if not boxes:
        return None
    points: list[tuple[float, float]] = []
    for left, top, count in boxes:
        points += [(left, top), (left + count, top), (left + count, top + 1), (left, top + 1), (left, top)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(points, codes)
