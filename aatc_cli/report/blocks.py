"""What a report is built of between its data and its text: tables, figures, marked text, and sections of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One cell; ``strong`` marks the best of its kind."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A captioned table. ``rules`` are the rows that start a new block; ``notes`` stand below the table.

    folded: whether the page shows its caption alone until it is asked for more.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    rules: frozenset[int] = frozenset()
    folded: bool = False

    @classmethod
    def plain(cls, caption: str, columns: tuple[str, ...], rows: list[list[str]], notes: tuple[str, ...] = ()) -> Table:
        """A table of texts, none of them marked."""
        return cls(caption, columns, tuple(tuple(Cell(text) for text in row) for row in rows), notes)


@dataclass(frozen=True)
class FigureBlock:
    """SVG elements that share a caption. ``name``: of the file that a figure of one element is written to as well.

    open: how many of them are seen at once; the page folds the others away.
    """

    svgs: tuple[str, ...]
    caption: str
    name: str | None = None
    open: int = 4


@dataclass(frozen=True)
class Piece:
    """A piece of marked text: what it says, how strongly it is marked (0 to 6), and what is told of it on request."""

    text: str
    level: int
    told: str


@dataclass(frozen=True)
class MarkedText:
    """A text whose pieces are shaded by a number. ``legend`` gives the least number of every level from 1 on."""

    caption: str
    pieces: tuple[Piece, ...]
    legend: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A titled part: paragraphs, then figures, tables and marked texts. ``slug`` is its anchor in the page."""

    slug: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[FigureBlock, ...] = ()
    tables: tuple[Table, ...] = ()
    marked: tuple[MarkedText, ...] = ()
