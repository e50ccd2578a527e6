"""Rank: leading latents at one width, as many as a site's importance gives it (Palu)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Ints, SiteEnergy
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site


class Rank(Allocator):
    """Kept latents in proportion to the root of what gradients say of a site (Palu, "fisher_uniform")."""

    name = "rank"
    meaning = "the widest width for leading latents, as many as the site's importance gives it"
    goes_with = together(transform=("whiten",))
    gradients = True
    fractional = False
    truncates = True

    def check(self, recipe: RecipeFields) -> None:
        """Groups of the quantizer are the kept latents of a token."""
        if "channel" in (recipe.coding.key_axis, recipe.coding.value_axis):
            raise ValueError('allocator "rank" goes with groups that lie in a token')

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Raises `AatcError` where the transform holds no gradients."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation
        from aatc_cli.core.ranks import proportional_ranks, rounded_rank

        recipe = choices.recipe
        places: list[tuple[int, Side]] = [(layer, side) for side in SIDES for layer in range(len(energies))]
        channels = energies[0]["k"].variance.size
        importance = np.array([gradient_energy(energies[layer][side], recipe.name) for layer, side in places]) ** 0.5
        total = math.floor(average / recipe.max_bits * channels * len(places) + 1e-9)
        bits: list[dict[Side, Ints]] = [{} for _ in energies]
        for (layer, side), rank in zip(places, proportional_ranks(importance, channels, total), strict=True):
            count = groups.of(side)
            size = channels // count
            kept = rounded_rank(rank, count, size, recipe.coding.rank_multiple)
            bits[layer][side] = np.tile(np.where(np.arange(size) < kept, recipe.max_bits, 0), count).astype(np.int64)
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The share of latents that the bits pay, of every group alike."""
        from aatc_cli.core.ranks import rounded_rank

        recipe, size = choices.recipe, channels // groups
        whole = round(bits / recipe.max_bits * channels)
        rank = rounded_rank(whole, groups, size, recipe.coding.rank_multiple) if whole else 0
        return ([recipe.max_bits] * rank + [0] * (size - rank)) * groups

    def codec(self, choices: Choices, site: Site) -> Any:
        """Matrices cut down to the kept latents, which are one group of the quantizer."""
        from aatc_cli.core.linear import LinearCodec, truncated

        recipe = choices.recipe
        kept = sum(width > 0 for width in site.widths) // site.groups
        encode, decode = truncated(*site.matrices(), kept, rotate=recipe.coding.latent_hadamard)
        inner = replace(site, widths=[recipe.max_bits] * (site.groups * kept), group=kept)
        return LinearCodec(encode, decode, choices.quantizer.codec(choices, inner))


def gradient_energy(site: SiteEnergy, recipe: str) -> float:
    """Sum of squared loss gradients of a site: the trace of M, from its weights in latent coordinates."""
    from aatc_cli.errors import AatcError

    if site.fisher is None or not site.fisher.any():
        raise AatcError(
            f"recipe {recipe} ranks by loss gradients, and the transform holds none",
            "collect with --fisher N (64 windows or more serve well), then whiten again",
        )
    alive = site.variance > 0
    # rows of the decode matrix are unit vectors times the root of the latent's second moment
    return math.fsum(site.fisher[alive] / site.variance[alive])
