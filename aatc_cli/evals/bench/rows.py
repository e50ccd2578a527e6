"""Rows of a result of speed, from times and from what a device can do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.roofline import DeviceRates, Roofline
from aatc_cli.evals.speed.result import SpeedRates, SpeedRow

Size = tuple[int, int]
# parts that are bound by the bytes of a cache
_READS = ("attention", "ragged")
Part = Literal["attention", "ragged", "packing", "decode"]


def recorded(rates: DeviceRates | None) -> SpeedRates | None:
    """Rates of a device as a result holds them."""
    if rates is None:
        return None
    return SpeedRates(
        read_bytes=rates.bytes, integer_instructions=rates.instructions, float8_multiply_adds=rates.multiply_adds
    )


def speed_rows(
    part: Part, size: Size, references: Sequence[Timing], others: Sequence[Timing], roof: Roofline | None = None
) -> list[SpeedRow]:
    """A row per backend, ours last with the ``roof``; ratios are to the fastest reference, or to ours without any."""
    fastest = min(references, key=lambda timing: median(timing.seconds), default=others[-1] if others else None)
    if fastest is None:
        return []
    best = median(fastest.seconds)
    rows = []
    alone = part != "decode"
    for timing in [*references, *others]:
        middle, low, high = median(timing.seconds), min(timing.seconds), max(timing.seconds)
        mine = roof if others and timing is others[-1] else None
        rows.append(
            SpeedRow(
                part=part,
                context=size[0],
                batch=size[1],
                backend=timing.backend,
                milliseconds=1e3 * middle,
                milliseconds_low=1e3 * low,
                milliseconds_high=1e3 * high,
                ratio=middle / best,
                ratio_low=low / best,
                ratio_high=high / best,
                bytes_moved=timing.bytes_moved,
                gigabytes_per_second=timing.bytes_moved / middle / 1e9 if alone else None,
                bound_milliseconds=1e3 * timing.bytes_moved / fastest.bytes_moved * best if part in _READS else None,
                roof_bytes_milliseconds=1e3 * mine.bytes if mine else None,
                roof_unpack_milliseconds=1e3 * mine.unpack if mine else None,
                roof_keys_milliseconds=1e3 * mine.keys if mine else None,
            )
        )
    return rows
