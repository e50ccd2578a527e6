"""One width per kv head from fitted curves: error(b) = a q^-b of the quantizer as it is, measured on sampled rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDEST = 8


def fitted_curves(errors: Floats, least: int) -> Floats:
    """The curves a q^-b that fit the logarithms of ``errors`` [n, 9] at ``least`` .. 8 bits best, at 0 .. 8. [n, 9].

    Never rising: a fit with q < 1 is made flat. Heads without error are zero. Source: RateQuant (2605.06675).
    """
    widths = np.arange(least, WIDEST + 1)
    measured = errors[:, least:]
    alive: NDArray[np.bool_] = np.all(measured > 0, axis=1)
    logs = np.log2(np.where(measured > 0, measured, 1.0))
    centred = widths - widths.mean()
    slope = np.minimum((logs * centred).sum(1) / (centred**2).sum(), 0.0)
    level = logs.mean(1) - slope * widths.mean()
    curves: Floats = np.exp2(level[:, None] + slope[:, None] * np.arange(WIDEST + 1))
    return np.where(alive[:, None], curves, 0.0)
