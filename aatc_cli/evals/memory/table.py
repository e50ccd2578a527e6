"""Results of memory, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.memory.result import Result
from aatc_cli.evals.rows import Rows


def tables(results: Sequence[Result]) -> list[Rows]:
    """Bytes of every plan's cache at every size, in MB; columns that nothing filled are left out."""
    columns = ["plan", "cache", "context", "batch", "live", "predicted", "float16", "ratio", "in use before", "peak"]
    columns += ["own cache: in use before", "own cache: peak"]
    rows = [
        [
            result.method,
            result.cache or "",
            f"{row.context:,}",
            str(row.batch),
            _megabytes(row.bytes_live),
            _megabytes(row.bytes_predicted),
            _megabytes(row.bytes_fp16),
            f"{row.ratio:.3g}",
            _megabytes(row.base_bytes),
            _megabytes(row.peak_bytes),
            _megabytes(row.base_bytes_reference),
            _megabytes(row.peak_bytes_reference),
        ]
        for result in results
        for row in result.rows
    ]
    kind = "synthetic: random vectors and widths, no model" if results[0].synthetic else f"{results[0].dtype} model"
    return [Rows(f"memory in MB of {results[0].model} ({kind})", columns, rows).filled()]


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
