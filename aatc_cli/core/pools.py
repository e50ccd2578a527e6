"""Pools: which sites share a budget. Keys and values apart or together, some layers protected, the rest in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Floats, Ints, reverse_waterfill
from aatc_cli.core.filling import Filling, flat
from aatc_cli.errors import AatcError

# widths [C] of the sites of a pool, whose energies are [groups, E], out of one budget
Fill = Callable[[Sequence[Floats], int, Filling], list[Ints]]


@dataclass(frozen=True)
class Protected:
    """Leading layers with budgets of their own: the average and so many bits per channel more, by side."""

    layers: int
    extra: Mapping[Side, float]


def separate_pools(
    values: Mapping[Side, Sequence[Floats]], average: float, rule: Filling, fill: Fill, protected: Protected
) -> Allocation:
    """A budget for keys and one for values, of ``average`` bits per channel each.

    values[side][layer] are energies [groups, E]. Raises `AatcError` when the budget cannot pay the protected layers.
    """
    bits: list[dict[Side, Ints]] = [{} for _ in values["k"]]
    predicted: dict[Side, float] = {}
    levels: dict[Side, float] = {}
    for side in SIDES:
        sites = list(values[side])
        pool_budget, budgets = _budgets(sites, rule, average, protected, side)
        for layer, budget in enumerate(budgets):
            bits[layer][side] = fill(sites[layer : layer + 1], budget, rule)[0]
        pool = sites[len(budgets) :]
        for layer, widths in enumerate(fill(pool, pool_budget, rule) if pool else [], start=len(budgets)):
            bits[layer][side] = widths
        predicted[side] = rule.left(sites, [layer[side] for layer in bits])
        levels[side] = reverse_waterfill(flat(pool), pool_budget)[1] if pool else 0.0
    return Allocation(bits, predicted, levels)


def joint_pool(values: Mapping[Side, Sequence[Floats]], average: float, rule: Filling, fill: Fill) -> Allocation:
    """One water level over keys and values of all layers; ``values`` as in `separate_pools`."""
    pool, layers = [*values["k"], *values["v"]], len(values["k"])
    budget = int(np.floor(average * sum(energy.size for energy in pool) + 1e-9))
    widths = fill(pool, budget, rule)
    bits: list[dict[Side, Ints]] = [{"k": k, "v": v} for k, v in zip(widths[:layers], widths[layers:], strict=True)]
    level = reverse_waterfill(flat(pool), budget)[1]
    predicted = {side: rule.left(values[side], [layer[side] for layer in bits]) for side in SIDES}
    return Allocation(bits, predicted, {"k": level, "v": level})


def equal_shares(sites: int, budget: int, block: int) -> list[int]:
    """The budget cut into equal parts of whole blocks, one for each of ``sites``."""
    units = budget // block
    edges = [units * i // sites for i in range(sites + 1)]
    return [block * (high - low) for low, high in pairwise(edges)]


def _budgets(
    sites: Sequence[Floats], rule: Filling, average: float, protected: Protected, side: Side
) -> tuple[int, list[int]]:
    channels = [value.size for value in sites]
    total = int(np.floor(average * sum(channels) + 1e-9))
    count, wanted = min(protected.layers, len(sites)), average + protected.extra[side]
    blocks = [size // rule.block for size in channels[:count]]
    # what would not fill a block is left to the pool
    budgets = [rule.block * int(np.floor(min(wanted, rule.widths[-1]) * size + 1e-9)) for size in blocks]
    left = total - sum(budgets)
    if left < 0:
        fewer = "use a recipe with fewer protected layers ([protect] layers = 0)"
        raise AatcError(
            f"{average:g} bits over {len(sites)} layers cannot pay for {count} protected layers at {wanted:g} bits",
            # of a model whose layers are all protected no average is as high as what each is to have
            fewer if count == len(sites) else f"raise the budget, or {fewer}",
        )
    return left, budgets
