"""Waterfill: one water level over all sites of a pool (the paper's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aatc_cli.methods.allocators.pooled import Pooled

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, Ints
    from aatc_cli.core.filling import Filling


class Waterfill(Pooled):
    """Bits where they gain most, over all layers."""

    name = "waterfill"
    meaning = "one water level over the channels of all layers"
    pools = True

    def fill(self, pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
        """All sites out of one budget."""
        from aatc_cli.core.filling import fill_sites

        return fill_sites(pool, budget, rule)
