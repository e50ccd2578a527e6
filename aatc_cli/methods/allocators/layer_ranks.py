"""Layer ranks: every group of layers keeps as many leading latents, three of values to two of keys (xKV)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Ints
    from aatc_cli.core.layout import Widths
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Tensors

# of the latents that are kept: the published ranks are 512 of keys and 768 of values
SHARE = {"k": 0.4, "v": 0.6}


class LayerRanks(Allocator):
    """Source: xKV (2503.18893). Latents of a group are written down layer after layer, C to each."""

    name = "layer-ranks"
    meaning = "leading latents of every group of layers, three of values to two of keys"
    goes_with = together(transform=("shared-basis",))
    fractional = False

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> dict[Side, list[int]]:
        """How many latents the bases of each side have."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.layer_groups import layer_groups
        from aatc_cli.methods.transforms.shared_basis import LAYERS

        groups = layer_groups(geometry.layers, LAYERS)
        return {
            side: [
                int(tensors.floats(f"joint.{side}.basis_{place}", (len(group) * geometry.channels, -1)).shape[1])
                for place, group in enumerate(groups)
            ]
            for side in SIDES
        }

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """What one side's bases cannot hold is not kept at all."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation
        from aatc_cli.core.layer_groups import layer_groups
        from aatc_cli.methods.transforms.shared_basis import LAYERS

        width, channels = choices.recipe.max_bits, energies[0]["k"].variance.size
        bits: list[dict[Side, Ints]] = [{} for _ in energies]
        for side in SIDES:
            for group, most in zip(layer_groups(len(energies), LAYERS), tables[side], strict=True):
                whole = len(group) * channels
                kept = min(math.floor(2 * SHARE[side] * average / width * whole + 1e-9), most)
                row = np.where(np.arange(whole) < kept, width, 0).astype(np.int64)
                for place, layer in enumerate(group):
                    bits[layer][side] = row[place * channels : (place + 1) * channels]
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The share of latents that the bits pay, as if every layer had its own."""
        kept = min(round(bits / choices.recipe.max_bits * channels), channels)
        return [choices.recipe.max_bits] * kept + [0] * (channels - kept)

    def rows(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths) -> tuple[int, int]:
        """Rows of latents of a token over all groups, and numbers of all bases."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.layer_groups import layer_groups
        from aatc_cli.methods.transforms.shared_basis import LAYERS

        found = [
            (sum(sum(map(bool, bits[layer][side])) for layer in group), len(group))
            for group in layer_groups(geometry.layers, LAYERS)
            for side in SIDES
        ]
        return sum(kept > 0 for kept, _ in found), sum(kept * count * geometry.channels for kept, count in found)
