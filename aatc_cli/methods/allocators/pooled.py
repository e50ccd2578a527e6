"""What allocators have in common that water-fill channels: pools of sites, and how one pool is filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import HeadGroups
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints
    from aatc_cli.core.filling import Filling
    from aatc_cli.methods.choices import Choices


class Pooled(Allocator):
    """Widths of channels out of budgets that sites share, with protected layers apart."""

    kinds = ("channels",)

    def fill(self, pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
        """Widths [C] of the sites of a pool, whose energies are [groups, E]."""
        raise NotImplementedError

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Keys and values apart or in one pool; raises `AatcError` when the budget cannot pay protected layers."""
        from aatc_cli.core.pools import Protected, joint_pool, separate_pools

        values, recipe = choices.grouped_energies(energies, groups), choices.recipe
        if recipe.pool == "joint":
            return joint_pool(values, average, choices.filling, self.fill)
        protect = recipe.protect
        protected = Protected(protect.layers, {"k": protect.key_extra, "v": protect.value_extra})
        return separate_pools(values, average, choices.filling, self.fill, protected)
