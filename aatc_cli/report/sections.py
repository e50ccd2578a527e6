"""What a report is made of between its data and its text: sections of paragraphs, figures and tables."""

from __future__ import annotations

from dataclasses import dataclass

from aatc_cli.report.tables import Table


@dataclass(frozen=True)
class FigureBlock:
    """SVG elements that share a caption."""

    svgs: tuple[str, ...]
    caption: str


@dataclass(frozen=True)
class Section:
    """A titled part: paragraphs, then figures, then tables. ``slug`` is its anchor in the page."""

    slug: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[FigureBlock, ...] = ()
    tables: tuple[Table, ...] = ()
