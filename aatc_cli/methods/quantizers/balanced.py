"""Balanced min-max: tiles of tokens brought to one spread in rows and columns before min-max (KVarN)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site


class Balanced(Quantizer):
    """Source: KVarN (2606.03458). A tile is what the window flushes at a time."""

    name = "balanced-minmax"
    meaning = "tiles of tokens brought to one spread in rows and columns, then between minimum and maximum"
    goes_with = together(
        allocator=("one-width", "keys-wider"),
        transform=("hadamard",),
        key_groups=("per-head",),
        value_groups=("per-head",),
    )

    def check(self, recipe: RecipeFields) -> None:
        """A spread is of two tokens at least."""
        if recipe.window.flush < 2:
            raise ValueError('quantizer "balanced-minmax" needs a window that flushes two tokens or more at a time')

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """For every tile of a head: step and minimum of a row, scale of a column; rows of keys are channels."""
        from aatc_cli.core.overheads import HALF, Overheads

        tile, dim = choices.recipe.window.flush, geometry.head_dim
        heads = {side: sum(any(layer[side]) for layer in bits) * geometry.kv_heads for side in bits[0]}
        return Overheads(
            {"key_scales": heads["k"] * (2 * dim + tile) * HALF, "value_scales": heads["v"] * (2 * tile + dim) * HALF}
        )

    def codec(self, choices: Choices, site: Site) -> Any:
        """Of the rotated vectors."""
        from aatc_cli.core.balanced import BalancedMinMax

        return BalancedMinMax(site.side, max(site.widths), choices.recipe.window.flush, site.geometry.head_dim)
