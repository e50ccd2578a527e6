"""Merged min-max: grouped-minmax of layers and shared directions, with lengths and the tokens left unmerged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.quantizers.grouped_minmax import Grouped

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Sites

# share of the tokens that stay unmerged
RETAINED = 0.05


class Merged(Grouped):
    """Source: MiniCache (2405.14366), whose codes are KIVI's. Retained tokens are coded as values are, both layers."""

    name = "merged-minmax"
    meaning = "grouped-minmax of shared directions, lengths of both layers, tokens that differ most apart"
    goes_with = together(allocator=("paired",), transform=("paired-layers",))

    def check(self, recipe: RecipeFields) -> None:
        """Retained tokens are coded by groups in a token."""
        if recipe.coding.group is None or recipe.coding.value_axis != "token":
            raise ValueError('quantizer "merged-minmax" needs a coding.group and coding.value_axis "token"')

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """As grouped-minmax; of pairs two float16 lengths per head, and codes, scales and places of retained tokens."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.overheads import HALF
        from aatc_cli.methods.transforms.paired_layers import shares_upper

        found = super().overheads(choices, geometry, groups, bits, blocks)
        window, group = choices.recipe.window, choices.recipe.coding.group or geometry.head_dim
        kept, layers = retained(window.flush), geometry.layers
        lengths = tokens = places = 0
        for upper in (layer for layer in range(layers) if shares_upper(layer, layers)):
            for side in SIDES:
                width = max(bits[upper - 1][side])
                lengths += 2 * window.flush * geometry.kv_heads * HALF * (width > 0)
                scales = 2 * HALF * geometry.channels // group
                tokens += 2 * kept * (geometry.channels * width // 8 + scales) * (width > 0)
                places += kept * (width > 0)
        return replace(found, live={**found.live, "lengths": lengths, "retained": tokens, "places": places})

    def joint_codec(self, choices: Choices, sites: Sites, side: Side) -> Any:
        """Layers alone and directions are coded as the first layer is, whose widths all that are coded have."""
        from aatc_cli.core.layer_groups import MergedPairs
        from aatc_cli.methods.transforms.paired_layers import first_pair

        alone = self.codec(choices, sites.of(0, side))
        by_token = replace(alone, axis="token", clip=choices.recipe.coding.value_clip)
        flush, geometry = choices.recipe.window.flush, sites.geometry
        return MergedPairs(first_pair(geometry.layers), geometry.head_dim, flush, retained(flush), alone, by_token)


def retained(block: int) -> int:
    """Tokens of a block that stay unmerged."""
    return max(1, math.ceil(RETAINED * block - 1e-9))
