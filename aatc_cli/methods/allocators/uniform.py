"""Uniform: the same width in every channel, nothing allocated by energy (an ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aatc_cli.methods.allocators.pooled import Pooled

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, Ints
    from aatc_cli.core.filling import Filling


class Uniform(Pooled):
    """Equal widths; what does not divide goes to leading channels."""

    name = "uniform"
    meaning = "the same width in every channel, as near to the budget as widths allow"

    def fill(self, pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
        """Every site out of an equal share."""
        from aatc_cli.core.filling import even_widths
        from aatc_cli.core.pools import equal_shares

        shares = equal_shares(len(pool), budget, rule.block)
        return [even_widths(energy.size, share, rule) for energy, share in zip(pool, shares, strict=True)]
