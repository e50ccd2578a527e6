"""The interval of a score that is honest at its edges, where the standard error of equal samples is zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

# 95 % of a normal distribution lie within this many deviations
_Z = 1.959963984540054


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Ends of Wilson's 95 % interval for the mean of ``scores`` between 0 and 1.

    Made for scores that are 0 or 1; scores in between vary less than such ones of the same mean, so for them it is
    wider than it need be. Two right answers of two give 0.34 to 1, not 1 +- 0.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    shrunk = 1 + _Z**2 / count
    center = (mean + _Z**2 / (2 * count)) / shrunk
    half = _Z / shrunk * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
    # rounding must not leave an end beyond the scores that there can be, nor within the mean itself
    return max(0.0, min(center - half, mean)), min(1.0, max(center + half, mean))
