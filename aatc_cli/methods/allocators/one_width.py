"""One width: every channel has the width that the budget names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Ints
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields


class OneWidth(Allocator):
    """What published quantizers of one width do."""

    name = "one-width"
    meaning = "every channel the same width, which the budget must be"
    one_width = True
    fractional = False

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """The widest width within ``average``; raises `AatcError` where there is none."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation

        width = width_of(choices.recipe, average)
        bits: list[dict[Side, Ints]] = [
            {side: np.full(layer[side].variance.size, width, dtype=np.int64) for side in SIDES} for layer in energies
        ]
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The width itself."""
        return [int(bits)] * channels


def width_of(recipe: RecipeFields, bits: float) -> int:
    """The widest width that a recipe of one width may use within ``bits``; raises `AatcError` where there is none."""
    from aatc_cli.errors import AatcError

    fitting = [width for width in recipe.allowed_widths if width <= bits + 1e-9 and width > 0]
    if not fitting:
        least = min(width for width in recipe.allowed_widths if width > 0)
        raise AatcError(f"recipe {recipe.name} begins at {least} bits, {bits:g} are too few", f"use --budget {least}")
    return max(fitting)
