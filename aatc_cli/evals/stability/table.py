"""Results of stability, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.evals.rows import Rows, with_error
from aatc_cli.evals.stability.result import Result

COLUMNS = (
    "plan",
    "calibrated on",
    "text",
    "bits",
    "KL (nats)",
    "predicted",
    "by the other Stats",
    "largest / smallest",
)


def stability_rows(results: Sequence[Result]) -> list[list[str]]:
    """What every plan's KL is and was foretold, in words for a table of `COLUMNS`."""
    found = []
    for result in results:
        for row in result.rows:
            kl = with_error(row.kl_mean, row.kl_stderr)
            forecasts = ["" if value is None else f"{value:.3g}" for value in (row.predicted, row.predicted_elsewhere)]
            ratio = result.kl_spread.get(row.text)
            found.append(
                [
                    result.method,
                    row.stats,
                    row.text,
                    f"{row.bits:.4g}",
                    kl,
                    *forecasts,
                    "" if ratio is None else f"{ratio:.3g}",
                ]
            )
    return found


def tables(results: Sequence[Result]) -> list[Rows]:
    """KL of every recipe at every budget by the Stats it was calibrated on, with what their gradients foretell."""
    return [Rows("stability", list(COLUMNS), stability_rows(results))]
