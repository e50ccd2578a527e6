"""Evaluations on windows of text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.evals.rows import Rows, with_error

_COLUMNS = ["method", "text", "bits", "packed bits", "ratio", "KL (nats)", "KL p99", "KL p99.9", "top-1"]


def window_tables(results: Sequence[Evaluation]) -> list[Rows]:
    """One row per subject and text; columns that nothing in it measured are left out."""
    rows = []
    for e in results:
        sizes = ["" if value is None else f"{value:.4g}" for value in (e.bits, e.bits_packed, e.ratio)]
        pairs = (
            (e.kl_mean, e.kl_stderr),
            (e.kl_p99, None),
            (e.kl_p999, None),
            (e.top1, e.top1_stderr),
            (e.nll, e.nll_stderr),
            (e.perplexity, e.perplexity_stderr),
        )
        seen = f"{e.calibration_share:.0%}" if e.calibration_share else ""
        rows.append([e.method, e.text, *sizes, *(with_error(*pair) for pair in pairs), seen])
    columns = [*_COLUMNS, "NLL (nats)", "perplexity", "calibrated on"]
    return [Rows("evaluations", columns, rows).filled()]
