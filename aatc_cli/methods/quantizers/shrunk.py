"""Shrunk: what tokens of a block share as a low rank, denoised, and what is left of each as norm and levels."""

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

# directions that a block has room for: of heads of 64 channels 4, and in proportion
_CHANNELS_A_DIRECTION = 16


class Shrunk(Quantizer):
    """Source: eOptShrinkQ (2605.02905). A block is what the window flushes at a time."""

    name = "shrunk-residual"
    meaning = "denoised low rank of a block at 4 bits, then norm and levels of what is left"
    goes_with = together(
        allocator=("one-width",), transform=("hadamard",), key_groups=("per-head",), value_groups=("per-head",)
    )

    def check(self, recipe: RecipeFields) -> None:
        """Noise is told by many tokens."""
        if recipe.window.flush < 64:
            raise ValueError('quantizer "shrunk-residual" needs a window that flushes 64 tokens or more at a time')

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Norms; for every block of a head room for all directions it may have, its levels, and how many it has."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.eoptshrink import LEVELS
        from aatc_cli.core.overheads import HALF, Overheads

        block, dim = choices.recipe.window.flush, geometry.head_dim
        heads = sum(any(layer[side]) for layer in bits for side in SIDES) * geometry.kv_heads
        rank = room(dim)
        return Overheads(
            {
                "norms": heads * block * HALF,
                "factors": heads * -(-rank * (block + dim) // 2),
                "singular_values": heads * rank * HALF,
                "levels": heads * LEVELS * HALF,
                "ranks": heads,
            }
        )

    def codec(self, choices: Choices, site: Site) -> Any:
        """Of the rotated vectors."""
        from aatc_cli.core.eoptshrink import ShrunkResidual

        dim = site.geometry.head_dim
        return ShrunkResidual(max(site.widths), choices.recipe.window.flush, dim, room(dim))


def room(dim: int) -> int:
    """Directions that a block of a head of ``dim`` channels has room for."""
    return max(1, dim // _CHANNELS_A_DIRECTION)
