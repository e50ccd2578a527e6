"""Keys wider: keys one bit above the budget, values one below it, every channel of a side alike (KVarN's 4 and 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.allocators.one_width import width_of
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Ints
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields


class KeysWider(Allocator):
    """What quantizers do that hold keys to be the more delicate of the two."""

    name = "keys-wider"
    meaning = "keys one bit above the budget, values one below it"
    one_width = True
    fractional = False

    def check(self, recipe: RecipeFields) -> None:
        """Values keep a bit."""
        if recipe.min_bits < 1 or recipe.max_bits < recipe.min_bits + 2 or recipe.widths is not None:
            raise ValueError('allocator "keys-wider" needs three widths in a row, the least of one bit')

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """The widest budget within ``average``; raises `AatcError` where a side has no such width."""
        import numpy as np

        from aatc_cli.core.allocate import Allocation
        from aatc_cli.errors import AatcError

        recipe = choices.recipe
        width, least, most = width_of(recipe, average), recipe.min_bits + 1, recipe.max_bits - 1
        if not least <= width <= most:
            raise AatcError(
                f"recipe {recipe.name} has keys at {width + 1} bits and values at {width - 1} at a budget of {width}",
                f"use --budget with one of {', '.join(map(str, range(least, most + 1)))}",
            )
        widths: dict[Side, int] = {"k": width + 1, "v": width - 1}
        bits: list[dict[Side, Ints]] = [
            {side: np.full(layer[side].variance.size, each, dtype=np.int64) for side, each in widths.items()}
            for layer in energies
        ]
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The budget, which both sides have on average."""
        return [int(bits)] * channels
