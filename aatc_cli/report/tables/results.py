"""Tables of what is measured beside quality: memory, speed, and how plans depend on their calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from aatc_cli.core.compare import Figure, difference
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import NeedleCell
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.table import Columns, memory_columns, speed_columns
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.table import COLUMNS, stability_rows
from aatc_cli.report.blocks import Table
from aatc_cli.report.data.protocols import DECIDING
from aatc_cli.report.series.needles import NeedleGroup
from aatc_cli.report.tables.scores import score_text
from aatc_cli.report.text import MISSING, number, size, spread

_Measured = TypeVar("_Measured", MemoryResult, SpeedResult)


def memory_tables(results: Sequence[MemoryResult]) -> list[Table]:
    """One table for every model and place that memory was measured in."""
    return [_memory_table(mine) for mine in _by_place(results)]


def _by_place(results: Sequence[_Measured]) -> list[list[_Measured]]:
    """Results that stand in one table: of the same weights, dtype, device and library versions, in order of arrival."""
    groups: dict[tuple[object, ...], list[_Measured]] = {}
    for result in results:
        versions = tuple(result.versions.get(name) for name in DECIDING)
        place = (result.model, result.model_fingerprint, result.device, result.dtype, result.synthetic, versions)
        groups.setdefault(place, []).append(result)
    return list(groups.values())


def _versions(result: MemoryResult | SpeedResult) -> str:
    """The versions that decide a figure, in words: ``torch 2.11.0, transformers 5.17.0``."""
    return ", ".join(f"{name} {result.versions[name]}" for name in DECIDING if name in result.versions)


def _memory_table(results: Sequence[MemoryResult]) -> Table:
    names = [
        *("plan", "packed bits", "context", "batch", "live", "byte law", "float16", "ratio"),
        *("in use before", "peak", "own cache: in use before", "own cache: peak"),
    ]
    rows = [
        [
            result.method,
            number(result.bits_packed),
            str(row.context),
            str(row.batch),
            size(row.bytes_live),
            size(row.bytes_predicted),
            size(row.bytes_fp16),
            f"{number(row.ratio)}x",
            *(
                MISSING if count is None else size(count)
                for count in (row.base_bytes, row.peak_bytes, row.base_bytes_reference, row.peak_bytes_reference)
            ),
        ]
        for result in results
        for row in result.rows
    ]
    first = results[0]
    kind = "random vectors and widths, no model" if first.synthetic else f"{first.dtype} model"
    place = ", ".join(part for part in (kind, _versions(first)) if part)
    return _filled(f"Memory of {first.model} on {first.device} ({place})", names, rows)


def speed_tables(results: Sequence[SpeedResult]) -> list[Table]:
    """One table for every model and place that anything was timed in, and one of memory where it was measured."""
    tables = []
    for mine in _by_place(results):
        first = mine[0]
        place = ", ".join(part for part in (f"{first.model} on {first.device}", first.dtype, _versions(first)) if part)
        tables.append(_of_columns(f"Speed of {place}", speed_columns(mine)))
        if any(result.memory for result in mine):
            tables.append(_of_columns(f"Memory in MB of decoding with {place}", memory_columns(mine)))
    return tables


def stability_table(results: Sequence[StabilityResult]) -> Table:
    """KL of every plan by the Stats it was calibrated on, beside what their gradients predict.

    Plans are compared on the same windows: how far each lies above the lowest on its text.
    """
    rows = stability_rows(results)
    gaps = [gap for result in results for gap in _above_lowest(result)]
    lines = [[*row, gap] for row, gap in zip(rows, gaps, strict=True)]
    note = "above the lowest: of the same recipe on the same text, with the standard error of the difference itself."
    columns = (*COLUMNS, "above the lowest")
    return Table.plain("KL by the Stats a plan was calibrated on, and its predictions", columns, lines, (note,))


def _above_lowest(result: StabilityResult) -> list[str]:
    figures = [Figure(r.kl_mean, r.kl_stderr, {"": r.kl_windows} if r.kl_windows else {}) for r in result.rows]
    found = []
    for row, figure in zip(result.rows, figures, strict=True):
        others = [f for r, f in zip(result.rows, figures, strict=True) if r.text_sha256 == row.text_sha256]
        lowest = min(others, key=lambda f: f.mean)
        gap = None if figure is lowest else difference(figure, lowest)
        found.append(MISSING if gap is None else spread(gap.mean, gap.stderr))
    return found


def needle_tables(groups: Sequence[NeedleGroup]) -> list[Table]:
    """Needles found by every cache at every context, over all depths, with the interval of the share."""
    tables = []
    for group in groups:
        contexts = sorted({context for result in group.results for context in result.contexts})
        rows = []
        for result, found in zip(group.results, group.maps, strict=True):
            cells = [[cell for cell in result.cells if cell.context == context] for context in contexts]
            rows.append([found.name, number(result.bits_packed), *(_found(part) for part in cells)])
        columns = ("method", "packed bits", *(f"{context} tokens" for context in contexts))
        note = "In percent, over all depths; in parentheses the 95 % interval (Wilson)."
        tables.append(Table.plain(f"Needles found by context: {group.title}", columns, rows, (note,)))
    return tables


def _found(cells: Sequence[NeedleCell]) -> str:
    hits, asked = sum(round(cell.score * cell.samples) for cell in cells), sum(cell.samples for cell in cells)
    return score_text(Figure(hits / asked, None, {"": [1.0] * hits + [0.0] * (asked - hits)})) if asked else MISSING


def _of_columns(caption: str, content: Columns) -> Table:
    columns, rows = content
    return Table.plain(caption, tuple(columns), rows)


def _filled(caption: str, columns: Sequence[str], rows: list[list[str]]) -> Table:
    """Without the columns that nothing filled."""
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", MISSING) for row in rows)]
    return Table.plain(caption, tuple(columns[i] for i in kept), [[row[i] for i in kept] for row in rows])
