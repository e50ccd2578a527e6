"""Figures of memory: bytes by cause, and bytes against the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.report.figures.axes import legend, look
from aatc_cli.report.figures.style import FULL_WIDTH, INK, MUTED, REST, SERIES, draw
from aatc_cli.report.series.plans import Bar, MemoryLine
from aatc_cli.report.text import size

# what is held exact is grey: it does not depend on the plan
_CAUSE_COLOURS = (SERIES[0], SERIES[1], SERIES[4], SERIES[3], MUTED, REST)


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

    told = "Key codes, value codes, padding, scales, sinks and window of every plan in percent of the float16 cache."
    height = 0.8 + len(bars) * (0.45 + 0.24 * count)
    return draw("bytes", FULL_WIDTH, height, paint, "Bytes by cause", told)


def memory_figure(lines: Sequence[MemoryLine]) -> str:
    """Live bytes (log-log) and their share of the float16 cache over the context; rings are measured."""

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for line in lines:
            plain = line.bits is None
            # the colour of a recipe only where the line is its own
            colour = MUTED if plain else look(line.recipes[0])[0] if len(line.recipes) == 1 else INK
            label = line.recipes[0] if len(line.recipes) == 1 else "several recipes"
            style = {"color": colour, "ls": (0, (5, 2)) if plain else "-", "lw": 1.3, "label": label}
            left.plot(line.contexts, line.bytes, **style)
            for context, count in line.measured:
                left.plot([context], [count], "o", mfc="none", mec=colour, ms=6)
            if line.bits is not None:
                right.plot(line.contexts, line.share, **style)
                end = (line.contexts[-1], line.share[-1])
                offset = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "size": 8}
                right.annotate(f"{line.bits:.2f}", end, color=colour, annotation_clip=False, **offset)
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ticks = lines[0].contexts[:: max(1, len(lines[0].contexts) // 5)]
            ax.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
            ax.set_xlabel("context (tokens)")
        left.set_yscale("log")
        left.yaxis.set_major_formatter(lambda value, _: size(round(value)))
        left.set_title("live bytes of one sequence")
        right.set(ylim=(0, None), ylabel="% of the float16 cache")
        right.set_title("share of the float16 cache")
        legend(figure, (left, right))

    bits = ", ".join(f"{line.bits:.2f}" for line in lines if line.bits is not None)
    told = f"Bytes of the float16 cache and of caches of {bits} packed bits from {lines[0].contexts[0]} tokens on."
    return draw("memory", FULL_WIDTH, 3.3, paint, "Memory against context", told)
