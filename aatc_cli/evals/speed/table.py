"""Speed results as rows of text, for eval, inspect and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.evals.rows import Rows
from aatc_cli.evals.speed.result import REFERENCE, Result

Columns = tuple[list[str], list[list[str]]]


def read_speed(folder: Path) -> list[Result]:
    """All speed results in ``folder``, in name order; raises `ArtifactError` for a damaged one."""
    return [read_measurement(path, Result) for path in sorted(folder.glob("speed.*.json"))]


def speed_columns(results: Sequence[Result]) -> Columns:
    """Names of columns and rows: times with their spread and what bounds them, without columns that nothing filled.

    Where the first result is of a CPU, ratios alone, and no row of the reference.
    """
    columns = ["plan", "part", "context", "batch", "computed by", "time / own cache", "repeats"]
    timed = ["milliseconds", "GB / s", "its bytes at the rate of the reference, ms", "roof: bytes, ms", "unpacking, ms"]
    timed += ["keys, ms", "tokens / s"]
    rows = []
    for result in results:
        for row in result.rows:
            bounds = (
                row.bound_milliseconds,
                row.roof_bytes_milliseconds,
                row.roof_unpack_milliseconds,
                row.roof_keys_milliseconds,
            )
            rows.append(
                [
                    result.method,
                    row.part,
                    f"{row.context:,}",
                    str(row.batch),
                    row.backend,
                    f"{row.ratio:.3g}",
                    f"{row.ratio_low:.3g} .. {row.ratio_high:.3g}",
                    f"{row.milliseconds:.4g} ({row.milliseconds_low:.4g} .. {row.milliseconds_high:.4g})",
                    f"{row.gigabytes_per_second:.4g}" if row.part == "packing" and row.gigabytes_per_second else "",
                    *("" if bound is None else f"{bound:.4g}" for bound in bounds),
                    f"{1e3 * row.batch / row.milliseconds:,.0f}" if row.part == "decode" else "",
                ]
            )
    if results[0].absolute:
        columns += timed
    else:
        rows = [row[: len(columns)] for row in rows if row[4] != REFERENCE]
    return _filled(columns, rows)


def memory_columns(results: Sequence[Result]) -> Columns:
    """Names of columns and rows: device memory of whole decode steps in MB, beside weights and the byte law."""
    columns = ["plan", "context", "batch", "cache", "peak", "weights", "byte law", "live", "static", "buffers"]
    columns += ["peak / (weights + law)"]
    rows = []
    for result in results:
        for row in result.memory:
            counts = (
                row.peak_bytes,
                row.weight_bytes,
                row.law_bytes,
                row.live_bytes,
                row.static_bytes,
                row.buffer_bytes,
            )
            rows.append(
                [
                    result.method,
                    f"{row.context:,}",
                    str(row.batch),
                    row.backend,
                    *(f"{count / 1e6:,.1f}" for count in counts),
                    f"{row.ratio:.4g}",
                ]
            )
    return columns, rows


def _filled(columns: list[str], rows: list[list[str]]) -> Columns:
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]


def tables(results: Sequence[Result]) -> list[Rows]:
    """Times beside the model's own cache; where whole steps were measured, device memory too."""
    found = [speed_table(results)]
    return [*found, speed_memory_table(results)] if any(result.memory for result in results) else found


def speed_table(results: Sequence[Result]) -> Rows:
    """Times beside the model's own cache, with the spread over repeats; on a CPU ratios alone."""
    first = results[0]
    columns, rows = speed_columns(results)
    where = "" if first.absolute else f", {first.threads} threads: only ratios mean anything on a CPU"
    return Rows(f"speed of {first.model} on {first.device}, median of {first.repeats}{where}", columns, rows)


def speed_memory_table(results: Sequence[Result]) -> Rows:
    """Device memory of whole decode steps, in MB, beside weights and the byte law."""
    columns, rows = memory_columns(results)
    return Rows(f"memory in MB of decoding with {results[0].model} on {results[0].device}", columns, rows)
