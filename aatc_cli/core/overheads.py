"""What a quantizer keeps beside its codes, by cause: scales, minima, norms, outliers, tables.

A part of the byte law (`core.layout`), which adds these to codes, sinks and window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

HALF = 2  # bytes of a float16 scale, minimum, norm or outlier
INDEX = 4  # bytes of an outlier's place, as the original's sparse matrices have it


@dataclass(frozen=True)
class Overheads:
    """Bytes beside codes, sinks and window, over all layers, in place of token scales and matrices.

    live: of one flush block of packed tokens, by cause. static: once, by cause.
    """

    live: Mapping[str, int]
    static: Mapping[str, int] = field(default_factory=dict)


def outlier_count(share: float, numbers: int) -> int:
    """How many of ``numbers`` values are kept exact: their share, rounded up."""
    return math.ceil(share * numbers - 1e-9)
