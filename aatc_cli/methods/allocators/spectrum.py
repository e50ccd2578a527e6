"""Spectrum: leading latents of every site until they hold one share of its spectrum (Eigen Attention)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.allocators.rank import Rank
from aatc_cli.methods.axes import together

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints
    from aatc_cli.core.layout import Widths
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Site


class Spectrum(Rank):
    """Source: Eigen Attention (2408.05646). The share is the same for all sites, as high as the budget pays."""

    name = "spectrum"
    meaning = "leading latents of every head, until all sites hold the same share of their singular values"
    goes_with = together(quantizer=("latents",), transform=("head-eigen",))
    gradients = False

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Latents in the order of the share that those before them hold, while they are paid."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation

        recipe = choices.recipe
        places: list[tuple[int, Side]] = [(layer, side) for layer in range(len(energies)) for side in SIDES]
        held = [shares_before(energies[layer][side].variance, groups.of(side)) for layer, side in places]
        channels = energies[0]["k"].variance.size
        budget = math.floor(average / recipe.max_bits * channels * len(places) + 1e-9)
        ranks = np.zeros(len(places), dtype=np.int64)
        spent = 0
        for share, place, rank in sorted((s, p, r) for p, row in enumerate(held) for r, s in enumerate(row.tolist())):
            price = groups.of(places[place][1])
            if spent + price > budget or rank != ranks[place] or math.isinf(share):
                continue
            ranks[place] += 1
            spent += price
        bits: list[dict[Side, Ints]] = [{} for _ in energies]
        for (layer, side), kept in zip(places, ranks.tolist(), strict=True):
            count = groups.of(side)
            row = np.where(np.arange(channels // count) < kept, recipe.max_bits, 0)
            bits[layer][side] = np.tile(row, count).astype(np.int64)
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The share of latents that the bits pay, of every head alike."""
        size = channels // groups
        kept = min(round(bits / choices.recipe.max_bits * size), size)
        return ([choices.recipe.max_bits] * kept + [0] * (size - kept)) * groups

    def codec(self, choices: Choices, site: Site) -> Any:
        """Matrices cut down to the kept latents, rotated where these share a range."""
        from aatc_cli.core.linear import LinearCodec, truncated
        from aatc_cli.methods.quantizers.latent import mixing

        bits = choices.recipe.max_bits
        kept = sum(width > 0 for width in site.widths) // site.groups
        encode, decode = truncated(*site.matrices(), kept)
        turn = mixing(bits, kept)
        if turn is not None:
            encode, decode = encode @ turn.to(encode.dtype), turn.mT.to(decode.dtype) @ decode
        inner = replace(site, widths=[bits] * (site.groups * kept), group=kept)
        return LinearCodec(encode, decode, choices.quantizer.codec(choices, inner))

    def rows(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths) -> tuple[int, int]:
        """Rows of latents of a token over all sites, and numbers of all decode matrices."""
        from aatc_cli.core import SIDES

        found = [(groups.of(side), sum(map(bool, layer[side]))) for layer in bits for side in SIDES]
        return (
            sum(count for count, kept in found if kept),
            sum(kept * (geometry.channels // count) for count, kept in found),
        )


def shares_before(variance: Floats, groups: int) -> Floats:
    """The share of a site's singular values that those before each rank hold, on average over its heads. [E].

    Ranks that no head has any of are infinite.
    """
    import numpy as np

    roots = np.sqrt(np.maximum(variance.reshape(groups, -1), 0.0))
    total = roots.sum(1, keepdims=True)
    spectrum = (roots / np.where(total > 0, total, 1.0)).mean(0)
    before = np.concatenate(([0.0], np.cumsum(spectrum)[:-1]))
    found: Floats = np.where(spectrum > 0, before, np.inf)
    return found
