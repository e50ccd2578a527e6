"""Token rates: every class of tokens at a water level of its own, so that no bit would serve better elsewhere.

A token of class k whose noise costs g_k times the average has energies g_k e_c in place of e_c. Minimising
sum_k p_k g_k D(b_k) under sum_k p_k b_k = budget, p_k the share of class k, is water-filling over the channels of all
classes together, where a bit of class k is bought for p_k of the tokens only: p_k is in the gain and in the price, and
one level cuts all g_k e_c. A class whose energies all lie below it is dropped: eviction.
"""

from __future__ import annotations

import math

import numpy as np

from aatc_cli.config import HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import (
    Allocation,
    Energies,
    Floats,
    Ints,
    channel_curves,
    fill_sites,
    normalized_energy,
    require_blocks,
    reverse_waterfill,
)
from aatc_cli.core.token_classes import TokenClasses
from aatc_cli.methods.recipe import Recipe


def allocate_classes(
    energies: Energies, recipe: Recipe, bits_per_channel: float, groups: HeadGroups, classes: TokenClasses
) -> Allocation:
    """Widths [n, C] for n classes of every layer and side at an average of ``bits_per_channel`` over all tokens.

    Raises `AatcError` as `core.allocate.allocate` does.
    """
    require_blocks(recipe, energies[0]["k"].variance.size, groups)
    rows: list[dict[Side, list[Ints]]] = [{side: [] for side in SIDES} for _ in energies]
    levels: dict[Side, float] = {}
    left: dict[Side, list[float]] = {side: [] for side in SIDES}
    pools: tuple[tuple[Side, ...], ...] = (SIDES,) if recipe.pool == "joint" else tuple((side,) for side in SIDES)
    for sides in pools:
        places = [
            (side, layer, k) for side in sides for layer in range(len(energies)) for k in range(classes.counts.shape[1])
        ]
        pool = [_energy(energies, recipe, groups, classes, place) for place in places]
        prices = [int(classes.counts[layer, k]) for _, layer, k in places]
        paid = np.repeat(np.array(prices), [energy.size for energy in pool])
        budget = math.floor(bits_per_channel * int(paid.sum()) + 1e-9)
        for (side, layer, k), energy, widths in zip(
            places, pool, fill_sites(pool, budget, recipe, prices), strict=True
        ):
            rows[layer][side].append(widths)
            errors = channel_curves(energy.ravel(), recipe)[np.arange(energy.size), widths]
            left[side].append(float(classes.shares[layer, k]) * math.fsum(errors))
        level = reverse_waterfill(np.concatenate([energy.ravel() for energy in pool]), budget, paid)[1]
        levels |= dict.fromkeys(sides, level)
    bits: list[dict[Side, Ints]] = [{side: np.stack(layer[side]) for side in SIDES} for layer in rows]
    return Allocation(bits, {side: math.fsum(parts) for side, parts in left.items()}, levels, classes=classes)


def _energy(
    energies: Energies, recipe: Recipe, groups: HeadGroups, classes: TokenClasses, place: tuple[Side, int, int]
) -> Floats:
    """Energies [groups, E] of one side of a layer as its class ``k`` has them."""
    side, layer, k = place
    found: Floats = normalized_energy(energies[layer][side], side, recipe) * classes.costs[side][layer, k]
    return found.reshape(groups.of(side), -1)
