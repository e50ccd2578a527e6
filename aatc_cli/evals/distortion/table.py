"""Results of distortion, for people: measured over predicted error, by side and width."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from aatc_cli.evals.distortion.result import Result
from aatc_cli.evals.rows import Rows


def tables(results: Sequence[Result]) -> list[Rows]:
    """The smallest, the median and the largest ratio over layers."""
    columns = ["plan", "side", "bits", "layers", "measured / predicted: min", "median", "max"]
    return [Rows("distortion", columns, [row for result in results for row in _rows(result)])]


def _rows(result: Result) -> list[list[str]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for row in result.distortion or []:
        label = "plan" if row.plan else f"{row.bits:g}"
        groups.setdefault((row.side, label), []).append(row.measured / row.predicted if row.predicted else float("nan"))
    return [
        [result.method, side, label, str(len(v)), f"{min(v):.3g}", f"{median(v):.3g}", f"{max(v):.3g}"]
        for (side, label), v in sorted(groups.items())
    ]
