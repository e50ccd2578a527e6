"""What a report is made of between its data and its text: sections of paragraphs, figures and tables."""

from __future__ import annotations

from dataclasses import dataclass

from aatc_cli.report.tables import Table


@dataclass(frozen=True)
class FigureBlock:
    """SVG elements that share a caption. ``name``: of the file that a figure of one element is written to as well."""

    svgs: tuple[str, ...]
    caption: str
    name: str | None = None


@dataclass(frozen=True)
class Section:
    """A titled part: paragraphs, then figures, then tables. ``slug`` is its anchor in the page."""

    slug: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[FigureBlock, ...] = ()
    tables: tuple[Table, ...] = ()
