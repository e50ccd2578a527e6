"""Results of recall, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.recall.result import RecallRow, Result
from aatc_cli.evals.rows import Rows, with_error

_COLUMNS = ["method", "tokens", "loss (nats)", "p90", "p99", "top-1", "p", "p uncompressed", "still first"]


def tables(results: Sequence[Result]) -> list[Rows]:
    """A table for every text and part of the tokens, a row for every subject."""
    found = []
    for text in dict.fromkeys(result.text for result in results):
        mine = [result for result in results if result.text == text]
        for part in dict.fromkeys(row.part for result in mine for row in result.rows):
            pairs = [(result, row) for result in mine if (row := result.row(part)) is not None]
            title = f"recall on {text}, {mine[0].places} second mentions, gap {mine[0].gap} or more: {part}"
            found.append(Rows(title, _COLUMNS, [_line(result.method, row) for result, row in pairs]))
    return found


def _line(method: str, row: RecallRow) -> list[str]:
    kept = "" if row.kept is None else f"{row.kept:.3f}"
    return [
        method,
        f"{row.tokens:.0f}",
        with_error(row.loss, row.loss_stderr),
        f"{row.loss_p90:.3g}",
        f"{row.loss_p99:.3g}",
        with_error(row.agree, row.agree_stderr),
        f"{row.probability:.3f}",
        f"{row.probability_reference:.3f}",
        kept,
    ]
