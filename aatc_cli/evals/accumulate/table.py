"""Results of accumulate, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.accumulate.result import AccumulateRow, Result
from aatc_cli.evals.accumulate.settings import WAYS
from aatc_cli.evals.rows import Rows, with_error

_WRITTEN = {
    "text": "the text itself",
    "own": "what the compressed cache writes",
    "uncompressed": "what the uncompressed cache writes",
}
_COLUMNS = ["method", "packed bits", "KL (nats)", "p50", "p90", "p99", "max", "KL by quarter", "top-1", "NLL change"]


def tables(results: Sequence[Result]) -> list[Rows]:
    """A table for every text, length and way of writing, a row for every subject."""
    found = []
    for place in dict.fromkeys((r.text, r.prompt, r.decoded) for r in results):
        mine = [r for r in results if (r.text, r.prompt, r.decoded) == place]
        text, prompt, decoded = place
        for way in WAYS:
            rows = [_line(result, row) for result in mine if (row := result.row(way)) is not None]
            if rows:
                title = f"{decoded} tokens decoded behind {prompt} of {text}: {_WRITTEN[way]}"
                found.append(Rows(title, _COLUMNS, rows))
    return found


def _line(result: Result, row: AccumulateRow) -> list[str]:
    return [
        result.method,
        "" if result.bits_packed is None else f"{result.bits_packed:.3g}",
        with_error(row.kl_mean, row.kl_stderr),
        *(f"{value:.2g}" for value in (row.kl_p50, row.kl_p90, row.kl_p99, row.kl_max)),
        ", ".join(f"{value:.2g}" for value in row.stretches),
        f"{row.top1:.3f}",
        with_error(row.nll_change, row.nll_change_stderr),
    ]
