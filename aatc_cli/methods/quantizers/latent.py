"""Latents: those that are kept as float16 numbers, or between their minimum and maximum in a token (low rank)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site

WHOLE = 16


class Latents(Quantizer):
    """Sources: Eigen Attention (2408.05646), xKV (2503.18893), both 16 bits; fewer as Palu (2407.21118) has them."""

    name = "latents"
    meaning = "kept latents as float16 numbers, or between minimum and maximum of a row"
    goes_with = together(allocator=("spectrum", "layer-ranks"))

    def check(self, recipe: RecipeFields) -> None:
        """One width beside none."""
        if recipe.allowed_widths not in ((0, recipe.max_bits),) or recipe.max_bits not in (*range(1, 9), WHOLE):
            raise ValueError('quantizer "latents" has widths 0 and one more, of 1 to 8 bits or 16')

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Decode rows; below 16 bits a float16 scale and minimum for every row of latents."""
        from aatc_cli.core.overheads import HALF, Overheads

        rows, numbers = choices.allocator.rows(choices, geometry, groups, bits)
        live = {} if choices.recipe.max_bits == WHOLE else {"scales": 2 * choices.recipe.window.flush * rows * HALF}
        return Overheads(live, {"decode_matrices": numbers * HALF})

    def codec(self, choices: Choices, site: Site) -> Any:
        """Of the latents of a site; ``site.group`` of them are a row."""
        return row_codec(choices.recipe.max_bits, site.group or 1, len(site.widths))


def mixing(bits: int, count: int) -> Tensor | None:
    """A rotation [count, count] of latents that share a range, which it makes alike; None where each is a float16."""
    from aatc_cli.core.rate_groups import rotation_of

    return None if bits == WHOLE or not count else rotation_of(count)


def row_codec(bits: int, row: int, count: int) -> Any:
    """The codec of ``count`` latents at ``bits``, ``row`` of them sharing a scale."""
    import torch

    from aatc_cli.core.grouped import GroupedMinMax
    from aatc_cli.core.plain import HalfCodec

    if bits == WHOLE or not count:
        return HalfCodec()
    return GroupedMinMax(torch.full((count,), bits), row)
