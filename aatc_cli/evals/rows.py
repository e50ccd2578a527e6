"""A table of results for people."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """Title, names of columns, rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def filled(self) -> Rows:
        """Without the columns that nothing filled."""
        shown = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return Rows(self.title, [self.columns[i] for i in shown], [[row[i] for i in shown] for row in self.rows])


def with_error(mean: float | None, stderr: float | None) -> str:
    """Three digits and the standard error, where there is one; nothing without a mean."""
    if mean is None:
        return ""
    return f"{mean:.3g}" if stderr is None else f"{mean:.3g} ± {stderr:.2g}"
