"""Drawing: each function takes prepared series and returns one SVG element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.core import SIDES
from aatc_cli.report.series import Bar, QualityPanel, Scatter, SpectrumPanel, Widths
from aatc_cli.report.svg import BAND, FULL_WIDTH, INK, LEVELS, MUTED, REST, SERIES, SIDE_COLOUR, draw, log_axis

MARKERS = "osD^vPX*"
# what is held exact is grey: it does not depend on the plan
_CAUSE_COLOURS = (SERIES[0], SERIES[1], SERIES[4], SERIES[3], MUTED, REST)
_SIDE_NAME = {"k": "keys", "v": "values"}


def quality_figure(panels: Sequence[QualityPanel], name: str = "quality") -> str:
    """KL (log) against packed bits with standard errors: a panel per protocol, a line per recipe.

    ``name`` prefixes the ids of the figure.
    """
    recipes = list(dict.fromkeys(line.recipe for panel in panels for line in panel.lines))

    def paint(figure: Any) -> None:
        axes = grid(figure, len(panels))
        for panel, ax in zip(panels, axes, strict=True):
            for line in panel.lines:
                i = recipes.index(line.recipe)
                error = [e or 0.0 for e in line.error]
                colour, marker = look(i)
                ax.errorbar(
                    line.x, line.y, error, color=colour, marker=marker, capsize=2.5, elinewidth=1.0, label=line.recipe
                )
            ax.set_yscale("log", nonpositive="clip")
            log_axis(ax.yaxis)
            ax.set(title=panel.title, xlabel="packed bits per number", ylabel="KL (nats per token)")
        legend(figure, axes)

    return draw(name, FULL_WIDTH, 0.4 + 3.0 * rows_of_panels(len(panels)), paint)


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the line at ``place``: colours come round with other markers."""
    return SERIES[place % len(SERIES)], MARKERS[(place + place // len(SERIES)) % len(MARKERS)]


def widths_figure(widths: Widths, top: float, widest: int, name: str, *, legend: bool) -> str:
    """Mean bits per layer and side, protected layers shaded, beside the histogram of widths.

    ``top`` bits and ``widest`` are the ends of both axes, shared by all plans of a report so they can be compared.
    """

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1.25))
        if widths.protected:
            left.axvspan(-0.5, widths.protected - 0.5, color=BAND, lw=0, zorder=0)
        for shift, side in zip((-0.2, 0.2), SIDES, strict=True):
            colour, label = SIDE_COLOUR[side], _SIDE_NAME[side]
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

    return draw(name, FULL_WIDTH, 1.75, paint)


def spectrum_figure(panels: Sequence[SpectrumPanel]) -> str:
    """Sorted energies (log) of a few sites, keys above values, with one horizontal line per water level."""
    columns = len(panels) // len(SIDES)

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(SIDES), columns, sharex=True, sharey="row", squeeze=False).ravel()
        for index, (panel, ax) in enumerate(zip(panels, axes, strict=True)):
            ax.plot(panel.rank, panel.energy, color=INK, lw=1.4)
            for i, (budget, level) in enumerate(panel.levels):
                ax.axhline(level, color=LEVELS[i % len(LEVELS)], lw=1.2, ls=(0, (5, 2)), label=budget)
            ax.set_yscale("log")
            log_axis(ax.yaxis)
            ax.set_title(f"layer {panel.layer}, {_SIDE_NAME[panel.side]}")
            if index % columns == 0:
                ax.set_ylabel("normalised energy")
            if index >= columns:
                ax.set_xlabel("channel rank")
        legend(figure, axes, title="water level of the plan at")

    return draw("spectrum", FULL_WIDTH, 4.6, paint)


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
                            label=f"{_SIDE_NAME[side]}, {kind}",
                        )
            ends = [value for p in scatter.points for value in (p.predicted, p.measured)]
            low, high = min(ends) / 1.6, max(ends) * 1.6
            ax.plot([low, high], [low, high], color=MUTED, lw=1.0, zorder=1, label="measured = predicted")
            ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
            for axis in (ax.xaxis, ax.yaxis):
                log_axis(axis)
            ax.set(title=scatter.title, xlabel="predicted (relative to the output)", ylabel="measured")
        legend(figure, axes, columns=3)

    return draw(
        "distortion", FULL_WIDTH if len(scatters) > 1 else 5.6, 0.7 + 4.0 * rows_of_panels(len(scatters)), paint
    )


def bytes_figure(bars: Sequence[tuple[int, Sequence[Bar]]]) -> str:
    """Stacked bars of the cache by cause in percent of float16: one panel per context."""
    count = len(bars[0][1])
    end = 1.3 * max(sum(bar.shares.values()) for _, panel in bars for bar in panel)

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(bars), 1, sharex=True, squeeze=False).ravel()
        for (context, panel), ax in zip(bars, axes, strict=True):
            start = [0.0] * count
            for colour, cause in zip(_CAUSE_COLOURS, panel[0].shares, strict=True):
                share = [bar.shares[cause] for bar in panel]
                ax.barh(range(count), share, 0.7, left=start, color=colour, label=cause, lw=0)
                start = [a + b for a, b in zip(start, share, strict=True)]
            for row, (bar, total) in enumerate(zip(panel, start, strict=True)):
                ax.text(total + 0.008 * end, row, bar.label, va="center", size=8, color=INK)
            ax.set_yticks(range(count), [bar.name for bar in panel])
            ax.set(title=f"{context} tokens", ylim=(count - 0.4, -0.6), xlim=(0, end))
            ax.tick_params(axis="y", length=0)
            ax.grid(False, axis="y")
        axes[-1].set_xlabel("% of the float16 cache")
        legend(figure, axes)

    return draw("bytes", FULL_WIDTH, 0.8 + len(bars) * (0.45 + 0.24 * count), paint)


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


def legend(figure: Any, axes: Sequence[Any], title: str | None = None, columns: int = 7) -> None:
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
            title=title,
            alignment="left",
            title_fontsize=8.5,
            handlelength=1.8,
            columnspacing=1.4,
        )
