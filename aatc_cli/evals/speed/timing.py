"""Timing side by side: repeats in turns, and the row that they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from aatc_cli.evals.speed.result import Part, SpeedRow


def alternate(timed: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """Seconds of every function, ``repeats`` times, in turns; the order is reversed every other time."""
    seconds: list[list[float]] = [[] for _ in timed]
    for repeat in range(repeats):
        order = range(len(timed))
        for index in order if repeat % 2 == 0 else reversed(order):
            seconds[index].append(timed[index]())
    return seconds


def speed_row(
    part: Part,
    context: int,
    batch: int,
    backend: str,
    seconds: Sequence[float],
    reference: Sequence[float],
    bytes_moved: int | None = None,
) -> SpeedRow:
    """The row of one backend from its seconds and the reference's in the same repeats."""
    ratios = [ours / theirs for ours, theirs in zip(seconds, reference, strict=True)]
    return SpeedRow(
        part=part,
        context=context,
        batch=batch,
        backend=backend,
        milliseconds=1e3 * median(seconds),
        milliseconds_low=1e3 * min(seconds),
        milliseconds_high=1e3 * max(seconds),
        ratio=median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        bytes_moved=bytes_moved,
    )
