"""Classes of tokens as a Plan has them: how many tokens of a tile are in each, and what noise in those costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import Side

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenClasses:
    """Classes of the tokens of every tile, least attended first.

    quotas: tokens of a tile in each of n classes. costs: per side and layer what noise in a token of the class costs,
    relative to the average token, [L, n].
    """

    quotas: tuple[int, ...]
    costs: dict[Side, Floats]

    @property
    def count(self) -> int:
        """Classes of every layer."""
        return len(self.quotas)

    @property
    def shares(self) -> Floats:
        """Share of every class among the tokens. [n]."""
        found: Floats = np.array(self.quotas) / sum(self.quotas)
        return found
