"""Token rates: every class of tokens at a water level of its own, so that no bit would serve better elsewhere.

A token of class k whose noise costs g_k times the average has energies g_k e_c in place of e_c. Minimising
sum_k p_k g_k D(b_k) under sum_k p_k b_k = budget, p_k the share of class k, is water-filling over the channels of all
classes together, where a bit of class k is bought for p_k of the tokens only: p_k is in the gain and in the price, and
one level cuts all g_k e_c. A class whose energies all lie below it is dropped: eviction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Floats, Ints, reverse_waterfill
from aatc_cli.core.filling import Filling, fill_sites, flat
from aatc_cli.core.token_classes import TokenClasses


def allocate_classes(
    values: Mapping[Side, Sequence[Floats]], average: float, rule: Filling, classes: TokenClasses, *, joint: bool
) -> Allocation:
    """Widths [n, C] for n classes of every layer and side at an average of ``average`` bits over all tokens.

    values[side][layer] are energies [groups, E] of the average token; ``joint``: one level for both sides. Raises
    `AatcError` as `core.filling.fill_sites` does.
    """
    layers = len(values["k"])
    rows: list[dict[Side, list[Ints]]] = [{side: [] for side in SIDES} for _ in range(layers)]
    levels: dict[Side, float] = {}
    left: dict[Side, list[float]] = {side: [] for side in SIDES}
    pools: tuple[tuple[Side, ...], ...] = (SIDES,) if joint else tuple((side,) for side in SIDES)
    for sides in pools:
        places = [(side, layer, k) for side in sides for layer in range(layers) for k in range(classes.count)]
        pool = [values[side][layer] * classes.costs[side][layer, k] for side, layer, k in places]
        prices = [int(classes.counts[layer, k]) for _, layer, k in places]
        paid = np.repeat(np.array(prices), [energy.size for energy in pool])
        budget = math.floor(average * int(paid.sum()) + 1e-9)
        for (side, layer, k), energy, widths in zip(places, pool, fill_sites(pool, budget, rule, prices), strict=True):
            rows[layer][side].append(widths)
            errors = rule.curves(energy.ravel())[np.arange(energy.size), widths]
            left[side].append(float(classes.shares[layer, k]) * math.fsum(errors))
        level = reverse_waterfill(flat(pool), budget, paid)[1]
        levels |= dict.fromkeys(sides, level)
    bits: list[dict[Side, Ints]] = [{side: np.stack(layer[side]) for side in SIDES} for layer in rows]
    return Allocation(bits, {side: math.fsum(parts) for side, parts in left.items()}, levels, classes=classes)
