"""Figure of spectra with the water levels of the plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.core import SIDES
from aatc_cli.report.figures.style import FULL_WIDTH, INK, LEVELS, SIDE_NAME, draw, log_axis
from aatc_cli.report.series.spectrum import SpectrumPanel

# levels differ in their dashes too: not all eyes and screens tell the colours apart
_DASHES = ((0, ()), (0, (6, 2)), (0, (3, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1.5, 1, 1.5, 1, 1.5)))


def spectrum_figure(panels: Sequence[SpectrumPanel]) -> str:
    """Sorted energies (log) of a few sites, keys above values, with a named line per water level."""
    columns = len(panels) // len(SIDES)

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(SIDES), columns, sharex=True, sharey="row", squeeze=False).ravel()
        for index, (panel, ax) in enumerate(zip(panels, axes, strict=True)):
            ax.plot(panel.rank, panel.energy, color=INK, lw=1.6)
            for i, (_, level) in enumerate(panel.levels):
                ax.axhline(level, color=LEVELS[i % len(LEVELS)], lw=1.4, ls=_DASHES[i % len(_DASHES)])
            ax.set_yscale("log")
            log_axis(ax.yaxis)
            ax.set_title(f"layer {panel.layer}, {SIDE_NAME[panel.side]}")
            if index % columns == 0:
                ax.set_ylabel("normalised energy")
            if index >= columns:
                ax.set_xlabel("channel rank")
            if index % columns == columns - 1:
                _name_levels(ax, panel)

    told = f"Energy of every channel in falling order in {columns} layers, with the water level of every plan."
    return draw("spectrum", FULL_WIDTH, 4.6, paint, "Spectrum and water level", told)


def _name_levels(ax: Any, panel: SpectrumPanel) -> None:
    """Names of the levels beside the last panel, moved apart where levels lie close."""
    low, high = (float(end) for end in ax.get_ylim())
    span, above = high / low, 0.0
    for i, (name, level) in sorted(enumerate(panel.levels), key=lambda item: item[1][1]):
        # one line of text takes about a fourteenth of the panel's height
        place = max(level, above * span ** (1 / 14))
        above = place
        ax.annotate(
            name,
            (1.0, level),
            (1.03, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            size=8,
            va="center",
            color=LEVELS[i % len(LEVELS)],
            annotation_clip=False,
        )
