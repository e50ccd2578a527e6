"""One class: all tokens are coded at the same widths."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.choices import Classes

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies
    from aatc_cli.core.layout import CacheLayout
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import PlannedWidths


class OneClass(Classes):
    """Of recipes that do not tell tokens apart."""

    name = "none"
    meaning = "all tokens alike"

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """As the allocator does."""
        return choices.allocator.allocate(choices, energies, average, groups, tables.allocator)

    def layout(self, choices: Choices, geometry: Geometry, groups: HeadGroups, plan: PlannedWidths) -> CacheLayout:
        """One stream, with the overheads of the quantizer."""
        from aatc_cli.core.layout import CacheLayout

        recipe, bits = choices.recipe, plan.bits[0]
        law = CacheLayout.of_bits(geometry, recipe.window, groups, bits, recipe.scale_bits)
        return replace(law, overheads=choices.quantizer.overheads(choices, geometry, groups, bits, plan.blocks))

    def nominal(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: float) -> CacheLayout:
        """By the widths that the allocator gives where nothing is known, or by a fraction of a bit."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.layout import CacheLayout

        recipe = choices.recipe
        layer: dict[Side, list[int]] = {
            side: choices.allocator.nominal_widths(choices, geometry.channels, groups.of(side), bits) for side in SIDES
        }
        widths = [layer] * geometry.layers
        overheads = choices.quantizer.overheads(choices, geometry, groups, widths, 0)
        if choices.allocator.fractional:
            law = CacheLayout.nominal(geometry, recipe.window, groups, bits, recipe.scale_bits)
        else:
            law = CacheLayout.of_bits(geometry, recipe.window, groups, widths, recipe.scale_bits)
        return replace(law, overheads=overheads)
