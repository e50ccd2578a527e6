"""Whether two figures differ by more than chance: paired where samples are shared, else by both errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_LEVEL = 0.95


@dataclass(frozen=True)
class Figure:
    """A mean, its standard error, and what it is the mean of: samples by part (a subtask; of KL, the one text).

    Parts weigh alike in the mean. ``parts`` is empty where samples were not kept.
    """

    mean: float
    stderr: float | None
    parts: dict[str, Sequence[float]]

    @property
    def binary(self) -> bool:
        """Whether every sample is a hit or a miss."""
        return bool(self.parts) and all(value in (0.0, 1.0) for values in self.parts.values() for value in values)


@dataclass(frozen=True)
class Difference:
    """The difference of two means, its standard error, and whether it is more than chance at 95 %.

    ``paired``: taken sample by sample, because both saw the same samples.
    """

    mean: float
    stderr: float | None
    apart: bool
    paired: bool


def difference(a: Figure, b: Figure) -> Difference | None:
    """``a`` minus ``b``; None where nothing is known of the errors.

    With the same samples in both, differences are taken sample by sample: hits and misses are judged by McNemar's exact
    test, other samples by Student's t with the degrees of freedom that they leave (Welch and Satterthwaite over several
    parts). Otherwise the two errors are added in squares, as of independent samples, and two of them decide.
    """
    gap = a.mean - b.mean
    if _paired(a, b):
        parts = [np.subtract(values, b.parts[part]) for part, values in a.parts.items()]
        error, quantile = _error_of_mean(parts)
        if a.binary and b.binary:
            return Difference(gap, error, _mcnemar(parts), True)
        if error is not None:
            return Difference(gap, error, abs(gap) > quantile * error, True)
    if a.stderr is None or b.stderr is None:
        return None
    error = math.hypot(a.stderr, b.stderr)
    return Difference(gap, error, abs(gap) > 2 * error, False)


def tied(a: Figure, b: Figure) -> bool | None:
    """Whether the two cannot be told apart (`difference`); None where no error is known."""
    found = difference(a, b)
    return None if found is None else not found.apart


def interval(parts: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % interval of the mean of hits and misses, parts weighing alike; None where a sample is neither.

    Of each part Wilson's, which stays honest where all samples are hits; over several parts the distances from each
    mean to its ends are added in squares (the method of variance estimates recovery).
    """
    if not parts or any(not part or any(value not in (0.0, 1.0) for value in part) for part in parts):
        return None
    mean, below, above = 0.0, 0.0, 0.0
    for part in parts:
        share = math.fsum(part) / len(part)
        ends = stats.binomtest(round(math.fsum(part)), len(part)).proportion_ci(_LEVEL, method="wilson")
        mean, below, above = mean + share, below + (share - ends.low) ** 2, above + (ends.high - share) ** 2
    count = len(parts)
    return max(0.0, (mean - math.sqrt(below)) / count), min(1.0, (mean + math.sqrt(above)) / count)


def _paired(a: Figure, b: Figure) -> bool:
    """Whether both are means of the same samples, part by part."""
    return bool(a.parts) and {k: len(v) for k, v in a.parts.items()} == {k: len(v) for k, v in b.parts.items()}


def _error_of_mean(parts: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> tuple[float | None, float]:
    """Standard error of the mean over parts that weigh alike, and the quantile of t at its degrees of freedom."""
    if any(part.size < 2 for part in parts):
        return None, math.inf
    squares = [float(part.var(ddof=1)) / part.size for part in parts]
    total = math.fsum(squares)
    if total == 0:
        return 0.0, 0.0
    freedom = total**2 / math.fsum(s**2 / (part.size - 1) for s, part in zip(squares, parts, strict=True))
    return math.sqrt(total) / len(parts), float(stats.t.ppf((1 + _LEVEL) / 2, freedom))


def _mcnemar(parts: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> bool:
    """Whether hits of one beside misses of the other are more than a fair coin gives."""
    better = sum(int((part > 0).sum()) for part in parts)
    worse = sum(int((part < 0).sum()) for part in parts)
    return better + worse > 0 and bool(stats.binomtest(better, better + worse).pvalue < 1 - _LEVEL)
