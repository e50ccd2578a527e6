"""One house style for all figures, and SVG text that can stand inside a page: themed, deterministic, unique ids."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# inches that fill the page's column; narrower figures keep their share of it
FULL_WIDTH = 8.4
# every colour of a figure is one of these; in the page it becomes a variable that the dark theme redefines
INK, MUTED, GRID, BAND, REST = "#22262a", "#6a7178", "#e3e6e9", "#f1f3f4", "#b3bbc2"
SERIES = ("#1f6fb4", "#d1661b", "#2b9166", "#8a5bb8", "#c23f57", "#8c7a1f", "#3a9bb0", "#77685d")
LEVELS = ("#7a1fa2", "#c2185b", "#d9541e", "#a67c00", "#2e7d32", "#0277bd")
# what was missed, or changed, from little to all
MARKS = ("#fff3c9", "#ffe19a", "#ffc56b", "#ff9f52", "#f9744a", "#e5484d")
# widths of channels, from one bit to the widest
WIDTHS = ("#cfe3f3", "#a6cbe8", "#78aedb", "#4a8fcb", "#2670b3", "#12528f", "#083868", "#03203f")
THEME = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    BAND: "band",
    REST: "rest",
    **{colour: f"s{i}" for i, colour in enumerate(SERIES, 1)},
    **{colour: f"w{i}" for i, colour in enumerate(LEVELS, 1)},
    **{colour: f"m{i}" for i, colour in enumerate(MARKS, 1)},
    **{colour: f"b{i}" for i, colour in enumerate(WIDTHS, 1)},
}
SIDE_COLOUR = {"k": SERIES[0], "v": SERIES[1]}
SIDE_NAME = {"k": "keys", "v": "values"}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "text.parse_math": False,  # names of texts and recipes may hold a dollar sign
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
}


def draw(name: str, width: float, height: float, paint: Callable[[Any], None], title: str, told: str) -> str:
    """The SVG element that ``paint`` draws on an empty figure of ``width`` x ``height`` inches.

    ``name`` salts and prefixes every id, so that figures can share a page. The text is a function of the drawing
    alone: no date, no random ids. ``title`` and ``told`` are for those who do not see it. No global plotting
    state is touched beyond this call.
    """
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        buffer = StringIO()
        with warnings.catch_warnings():
            # of letters that the font lacks, which a name of a text may have
            warnings.filterwarnings("ignore", message="Glyph ")
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    opening = (
        f'<svg style="width: {100 * width / FULL_WIDTH:.3g}%" role="img" aria-labelledby="{name}-title {name}-told" '
    )
    spoken = f'<title id="{name}-title">{escape(title)}</title>\n<desc id="{name}-told">{escape(told)}</desc>\n'
    element = _inline(buffer.getvalue(), name).replace("<svg ", opening, 1)
    body = element.index(">") + 1
    return f"{element[:body]}\n{spoken}{element[body:].lstrip()}"


def standalone(element: str) -> str:
    """An element of `draw` as a file of its own: with its namespace, on white, in the light theme's colours."""
    opened = re.sub(r'style="[^"]*"', 'style="background: #ffffff"', element, count=1)
    return opened.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def log_axis(axis: Any) -> None:
    """Plain labels at powers of ten, and at 2 and 5 times them where the axis spans little: call it after plotting.

    Mathematical text would bring its own font and placement.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high < 80 * low else (1.0,), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("e-0", "e-").replace("e+0", "e")))
    axis.set_minor_formatter(NullFormatter())


def _inline(text: str, name: str) -> str:
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| version="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    # only inside style attributes: a text may show a colour code of its own
    return re.sub(r'style="[^"]*"', lambda match: _themed(match[0]), text)


def _themed(style: str) -> str:
    style = re.sub(r"#[0-9a-f]{6}", lambda m: f"var(--{THEME[m[0]]}, {m[0]})" if m[0] in THEME else m[0], style)
    return re.sub(r"'DejaVu Sans'", "var(--font, sans-serif)", style)
