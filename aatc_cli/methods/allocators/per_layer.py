"""Per layer: the same budget for every layer, water-filled inside it (an ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aatc_cli.methods.allocators.pooled import Pooled

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, Ints
    from aatc_cli.core.filling import Filling


class PerLayer(Pooled):
    """Equal budgets."""

    name = "per-layer"
    meaning = "the same budget for every layer, water-filled inside it"

    def fill(self, pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
        """Every site out of an equal share."""
        from aatc_cli.core.filling import fill_sites
        from aatc_cli.core.pools import equal_shares

        shares = equal_shares(len(pool), budget, rule.block)
        return [fill_sites([energy], share, rule)[0] for energy, share in zip(pool, shares, strict=True)]
