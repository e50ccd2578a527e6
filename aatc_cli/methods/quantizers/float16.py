"""The uncompressed reference: half floats."""

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


class Float16(Quantizer):
    """With the allocator that allocates nothing the reference, of which there is no plan; else what a press leaves."""

    name = "float16"
    meaning = "none: the uncompressed reference"
    goes_with = together(allocator=("none", "one-width"), transform=("identity",))

    def check(self, recipe: RecipeFields) -> None:
        """A width that is no choice, and without a press nothing to plan."""
        if recipe.allocator == "one-width" and (recipe.press == "none" or recipe.min_bits != 16):
            raise ValueError('quantizer "float16" goes with allocator "none", or with a press and min_bits = 16')

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads | None:
        """Nothing beside its codes."""
        from aatc_cli.core.overheads import Overheads

        return None if choices.allocator.nothing else Overheads({})

    def codec(self, choices: Choices, site: Site) -> Any:
        """A cast."""
        import torch

        from aatc_cli.core.codec import CastCodec

        return CastCodec(torch.float16)
