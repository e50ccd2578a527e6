"""The widths of a site's channels, reduced to what bytes depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PLANES = (16, 8, 4, 2, 1)


def plane_counts(bits: Sequence[int]) -> dict[int, int]:
    """How many channels of a site have each power-of-two plane in their width."""
    return {plane: sum(1 for width in bits if width & plane) for plane in PLANES}


@dataclass(frozen=True)
class SiteWidths:
    """The widths of one site, reduced to what bytes depend on."""

    code_bits: float
    active: int
    key_row_bytes: float
    value_block_bytes: float

    @classmethod
    def of(cls, bits: Sequence[int], flush: int) -> SiteWidths:
        """From the integer widths of every channel."""
        planes = plane_counts(bits)
        return cls(
            code_bits=float(sum(bits)),
            active=sum(1 for width in bits if width > 0),
            key_row_bytes=float(sum(math.ceil(n * plane / 8) for plane, n in planes.items())),
            value_block_bytes=float(sum(n * math.ceil(flush * plane / 8) for plane, n in planes.items())),
        )

    @classmethod
    def nominal(cls, channels: int, bits: float, flush: int) -> SiteWidths:
        """Without a plan: every channel at a possibly fractional width, no padding."""
        total = channels * bits
        return cls(code_bits=total, active=channels, key_row_bytes=total / 8, value_block_bytes=flush * total / 8)
