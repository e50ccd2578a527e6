"""Tables of distortion: measured over predicted error, by recipe, side and width."""

from __future__ import annotations

import statistics

from aatc_cli.report.blocks import Table
from aatc_cli.report.series.distortion import DistortionGroup
from aatc_cli.report.text import MISSING, number


def distortion_table(group: DistortionGroup) -> Table:
    """Measured over predicted distortion per (recipe, side, width): median and range over layers."""
    columns = ("recipe", "side", "bits", "layers", "measured", "measured / predicted", "range", "measured / theorem")
    rows = []
    for points in group.by_width():
        head = points[0]
        ratios = [p.ratio for p in points if p.ratio is not None]
        rows.append(
            [
                head.recipe,
                head.side.upper(),
                head.width,
                str(len(points)),
                number(statistics.median(p.measured for p in points)),
                _median(ratios),
                f"{number(min(ratios))} to {number(max(ratios))}" if ratios else MISSING,
                _median([p.measured / p.diagonal for p in points if p.diagonal > 0]),
            ]
        )
    notes = (
        "Medians over layers. The prediction keeps the coupling of heads that share a cache; "
        "the theorem adds heads as if they were independent.",
    )
    return Table.plain(f"Distortion on {group.protocol.describe()}", columns, rows, notes)


def _median(values: list[float]) -> str:
    return number(statistics.median(values) if values else None)
