"""Salience: three widths for key channels by what their steps do to scores, one width for values (MixKVQ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Tensors

# a channel is kept as it is from this many times the salience on from which it has the middle width
RATIO = 4.0


class Salience(Allocator):
    """Source: MixKVQ (2512.19206). Values take the narrowest width, keys of all layers share what is left."""

    name = "salience"
    meaning = "three widths for key channels by their salience, the narrowest for values"
    goes_with = together(quantizer=("mixed-minmax",))
    fractional = False

    def check(self, recipe: RecipeFields) -> None:
        """Three widths, the last of them whole numbers."""
        if recipe.widths is None or len(recipe.widths) != 3 or recipe.widths[-1] != 16 or recipe.widths[0] < 1:
            raise ValueError('allocator "salience" has three widths, of which the widest is 16, such as [2, 4, 16]')

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> list[Floats]:
        """Salience [C] of every layer's key channels."""
        shape = (geometry.channels,)
        return [tensors.numbers(f"layers.{layer}.k.salience", shape) for layer in range(geometry.layers)]

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Raises `AatcError` where the budget is below the narrowest width."""
        import numpy as np

        from aatc_cli.core.allocate import Allocation
        from aatc_cli.core.mixed import tiers
        from aatc_cli.errors import AatcError

        recipe, layers = choices.recipe, tables
        ranked: Sequence[Floats] = layers
        low, middle, high = recipe.allowed_widths
        if average < low:
            raise AatcError(
                f"recipe {recipe.name} begins at {low} bits, {average:g} are too few", f"use --budget {low}"
            )
        channels = ranked[0].size
        budget = math.floor((2 * average - low) * channels * len(ranked) + 1e-9)
        widths = tiers(np.concatenate(ranked), budget, (low, middle, high), RATIO)
        bits: list[dict[Side, Ints]] = [
            {"k": widths[place * channels : (place + 1) * channels], "v": np.full(channels, low, dtype=np.int64)}
            for place in range(len(ranked))
        ]
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """As many channels of the middle width as the bits pay."""
        low, middle, _ = choices.recipe.allowed_widths
        wide = min(max(round((bits - low) / (middle - low) * channels), 0), channels)
        return [middle] * wide + [low] * (channels - wide) if bits > 0 else [0] * channels
