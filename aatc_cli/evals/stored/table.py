"""Results of stored, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.rows import Rows, with_error
from aatc_cli.evals.stored.result import Result


def tables(results: Sequence[Result]) -> list[Rows]:
    """One row per plan and text."""
    rows = [
        [
            e.method,
            e.text,
            e.ranked,
            "" if e.ratio is None else f"{e.ratio:.2f}",
            with_error(e.kl_mean, e.kl_stderr),
            with_error(e.kl_p99, None),
            with_error(e.top1, None),
        ]
        for e in results
    ]
    columns = ["method", "text", "ranked by", "ratio", "KL (nats)", "KL p99", "top-1"]
    return [Rows("stored prefixes", columns, rows)]
