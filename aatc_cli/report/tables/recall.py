"""Table of recall: what second mentions lose, a table for every text and model, a row for every method and part."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.recall.result import RecallRow, Result
from aatc_cli.report.blocks import Cell, Table
from aatc_cli.report.data.run import paper_first
from aatc_cli.report.text import MISSING, number

_COLUMNS = ("method", "packed bits", "part", "tokens", "loss", "p99", "top-1", "p", "p uncompressed", "still first")


def recall_tables(results: Sequence[Result]) -> list[Table]:
    """Results of one protocol beside one another, methods by falling bits."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.stamp, []).append(result)
    tables = []
    for mine in groups.values():
        one = mine[0]
        caption = (
            f"{one.places} second mentions in {one.windows} windows of {one.length} tokens of {one.text}, "
            f"{one.gap} tokens or more behind the first; {one.model}, {one.dtype} on {one.device}"
        )
        ordered = sorted(mine, key=lambda r: (r.plan is not None, -r.bits, paper_first(r.recipe)))
        lines = [_line(result, row) for result in ordered for row in result.rows]
        tables.append(Table(caption, _COLUMNS, tuple(lines), ("± is one standard error over windows.",)))
    return tables


def _line(result: Result, row: RecallRow) -> tuple[Cell, ...]:
    error = "" if row.loss_stderr is None else f" ± {row.loss_stderr:.2g}"
    shown = (
        result.method,
        number(result.bits_packed),
        row.part,
        f"{row.tokens:.0f}",
        f"{row.loss:.3g}{error}",
        f"{row.loss_p99:.3g}",
        f"{row.agree:.3f}",
        f"{row.probability:.3f}",
        f"{row.probability_reference:.3f}",
        MISSING if row.kept is None else f"{row.kept:.3f}",
    )
    return tuple(Cell(text) for text in shown)
