"""Whether two figures differ by more than chance: paired where samples are kept, by both errors where they are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.core.metrics import mean_and_stderr


@dataclass(frozen=True)
class Figure:
    """A mean, its standard error, and what it is the mean of: samples by part (a subtask; of KL, the one text).

    Parts weigh alike in the mean. ``parts`` is empty where samples were not kept.
    """

    mean: float
    stderr: float | None
    parts: dict[str, Sequence[float]]


def tied(a: Figure, b: Figure) -> bool | None:
    """Whether the means lie within two standard errors of their difference; None where no error is known.

    With the same samples in both the error is that of the differences sample by sample; otherwise the two errors are
    added in squares, as of independent samples, which is too large an error where both saw the same.
    """
    error = _paired_error(a, b)
    if error is None and a.stderr is not None and b.stderr is not None:
        error = math.hypot(a.stderr, b.stderr)
    return None if error is None else abs(a.mean - b.mean) <= 2 * error


def _paired_error(a: Figure, b: Figure) -> float | None:
    """Standard error of the difference of both means from differences of samples; None where they do not pair."""
    if not a.parts or {k: len(v) for k, v in a.parts.items()} != {k: len(v) for k, v in b.parts.items()}:
        return None
    squares = []
    for part, values in a.parts.items():
        _, error = mean_and_stderr([x - y for x, y in zip(values, b.parts[part], strict=True)])
        if error is None:
            return None
        squares.append(error**2)
    return math.sqrt(math.fsum(squares)) / len(squares)
