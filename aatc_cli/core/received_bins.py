"""Bins of received attention, and the distances at which it counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aatc_cli.config import Window

_OCTAVES = (-24, 8)
_ROOT_TWO = 1.4142135623730951  # a constant, so that thresholds do not depend on a machine's exp2
BINS = 2 * (_OCTAVES[1] - _OCTAVES[0])
# fixed signs that gradients of the tokens in a bin are multiplied with
PROBES = 4
_STEPS = np.arange(1, BINS)
# edges between the bins, rising, two to an octave; a bin holds its lower edge
EDGES: NDArray[np.float64] = np.ldexp(np.array((1.0, _ROOT_TWO))[_STEPS % 2], _OCTAVES[0] + _STEPS // 2)


def watched_lags(window: Window) -> tuple[int, int]:
    """First and last distance t - i of the queries that count for token i.

    The last is w - f: the latest query that every token of a flush block meets in the window, wherever it stands in the
    block. The first is half of that: what its neighbours pay a token says little of what later ones will.
    """
    last = window.recent - window.flush
    return last // 2, last
