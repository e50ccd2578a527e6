"""Results of needles, for people: a heat map in figures."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.needles.result import Result
from aatc_cli.evals.rows import Rows


def tables(results: Sequence[Result]) -> list[Rows]:
    """Needles found in percent, by depth and context, a table for every subject."""
    return [_table(result) for result in results]


def _table(result: Result) -> Rows:
    rows = [
        [f"{depth} %", *("" if score is None else f"{100 * score:.0f}" for score in scores)]
        for depth, scores in zip(result.depths, result.heat, strict=True)
    ]
    cells = result.cells
    how = f", {result.cache} cache" if result.cache else ""
    title = f"needles found by {result.method}{how}, in % of {cells[0].samples if cells else 0} at each place"
    return Rows(title, ["depth", *(f"{context:,}" for context in result.contexts)], rows)
