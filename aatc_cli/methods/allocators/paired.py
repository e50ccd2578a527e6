"""Paired: one width for all layers but the upper ones of pairs, which have no codes of their own (MiniCache)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.allocators.one_width import width_of
from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import HeadGroups
    from aatc_cli.core.allocate import Allocation, Energies
    from aatc_cli.methods.choices import Choices


class Paired(Allocator):
    """Source: MiniCache (2405.14366). The budget is the width of what is coded, about three quarters of the layers."""

    name = "paired"
    meaning = "one width, which the budget must be, for all layers but the upper ones of pairs"
    goes_with = together(transform=("paired-layers",))
    one_width = True
    fractional = False

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """The widest width within ``average``; raises `AatcError` where there is none."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation
        from aatc_cli.methods.transforms.paired_layers import shares_upper

        width, layers = width_of(choices.recipe, average), len(energies)
        channels = energies[0]["k"].variance.size
        each = [0 if shares_upper(layer, layers) else width for layer in range(layers)]
        bits = [{side: np.full(channels, own, dtype=np.int64) for side in SIDES} for own in each]
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The width itself, in all layers: no layer is told from another here."""
        return [int(bits)] * channels
