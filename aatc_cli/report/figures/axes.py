"""What the figures share: panels in two columns with titles that fit, one legend, one look per recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from aatc_cli.report.figures.style import SERIES

MARKERS = "osD^vPX*"
# characters of a title that stand beside each other over a panel of the whole width
_TITLE = 96
# a recipe looks the same in every figure of every report; those that a user wrote get a place by their name
_PLACES = {
    name: place
    for place, name in enumerate(
        (
            "paper",
            "loss-aware",
            "var-only",
            "kivi",
            "kvquant",
            "kvtc",
            "uniform",
            "palu",
            "loss-aware-tiles",
            "turboquant",
            "per-token",
            "per-channel",
            "oscar",
            "ratequant",
            "kvtc-global",
            "loss-aware-fused",
            "no-query",
            "no-output",
            "per-layer",
            "global",
            "paper-fused",
            "fp8",
            "quanto",
            "hqq",
        )
    )
}


def look(recipe: str) -> tuple[str, str]:
    """Colour and marker of a recipe: colours come round with other markers."""
    place = _PLACES.get(recipe, len(_PLACES) + crc32(recipe.encode()) % (len(SERIES) * len(MARKERS)))
    return SERIES[place % len(SERIES)], MARKERS[(place + place // len(SERIES)) % len(MARKERS)]


def title(ax: Any, text: str, columns: int) -> None:
    """A panel's title on at most two lines, cut so that it does not run into the next panel's."""
    room = _TITLE // columns
    ax.set_title("\n".join(textwrap.wrap(text, room, max_lines=2, placeholder=" ...", break_long_words=True)))


def rows_of_panels(panels: int) -> int:
    """Rows of a grid of panels in two columns."""
    return (panels + 1) // 2


def grid(figure: Any, panels: int) -> list[Any]:
    """Axes in two columns, one column for a single panel; the odd last place stays empty."""
    columns = min(2, panels)
    axes = list(figure.subplots(rows_of_panels(panels), columns, squeeze=False).ravel())
    for spare in axes[panels:]:
        spare.remove()
    return axes[:panels]


def legend(figure: Any, axes: Sequence[Any], heading: str | None = None, columns: int = 7) -> None:
    """One legend above all panels, each label once."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside upper left",
            ncols=min(len(handles), columns),
            title=heading,
            alignment="left",
            title_fontsize=8.5,
            handlelength=1.8,
            columnspacing=1.4,
        )
