"""A plan of tiles from energies and costs by class: widths of every site, and what they are predicted to leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Floats, Ints
from aatc_cli.core.tile_allocate import Units, allocate_planes
from aatc_cli.core.tile_bytes import order_bytes
from aatc_cli.core.tile_classes import TileRule
from aatc_cli.core.token_classes import TokenClasses


def plan_tiles(
    values: Mapping[Side, Sequence[Floats]],
    costs: Sequence[Mapping[Side, Floats]],
    average: float,
    curve: Floats,
    rule: TileRule,
    heads: int,
    scale_bits: int,
    *,
    joint: bool,
    alone: bool = False,
) -> Allocation:
    """Widths [n, C] of every layer and side at ``average`` bits a number with all that a tile holds.

    values[side][layer] [groups, E]: energies of the average token; costs[layer][side] [n, C]: of tokens of each class,
    relative to it. heads: that rank their tokens each by itself. joint: one budget for keys and values, or two halves.
    alone: values may be coded where keys are not.
    """
    layers, channels = len(costs), values["k"][0].size
    whole = math.floor(average * rule.tile * 2 * channels * layers + 1e-9)
    budget = whole - 8 * layers * order_bytes(rule, heads)
    bits: list[dict[Side, Ints]] = [{} for _ in range(layers)]
    levels: dict[Side, float] = {}
    left: dict[Side, list[float]] = {side: [] for side in SIDES}
    pools: tuple[tuple[Side, ...], ...] = (SIDES,) if joint else tuple((side,) for side in SIDES)
    for sides in pools:
        pool = [_units(values[side], [layer[side] for layer in costs], rule) for side in sides]
        if sides == ("v",):
            pool = [_where_coded(pool[0], [layer["k"] for layer in bits])]
        widths, level = allocate_planes(
            pool, budget // len(pools), curve, scale_bits, follow=joint and not alone and _alike(pool)
        )
        for side, units, found in zip(sides, pool, widths, strict=True):
            errors = units.tokens / rule.tile * _summed(units.energy * curve[found])
            for layer, (rows, parts) in enumerate(zip(np.split(found, layers), np.split(errors, layers), strict=True)):
                bits[layer][side] = rows.reshape(rule.classes, channels)
                left[side].append(math.fsum(parts))
            levels[side] = level
    return Allocation(
        bits, {side: math.fsum(parts) for side, parts in left.items()}, levels, classes=_classes(values, costs, rule)
    )


def _units(values: Sequence[Floats], costs: Sequence[Floats], rule: TileRule) -> Units:
    """The units of one side: layer by layer, class by class, head group by head group."""
    size = values[0].shape[1]
    energy = np.concatenate(
        [(energies.ravel() * cost).reshape(-1, size) for energies, cost in zip(values, costs, strict=True)]
    )
    tokens = np.tile(np.repeat(np.array(rule.quotas), values[0].shape[0]), len(values))
    return Units(energy, tokens)


def _alike(pool: Sequence[Units]) -> bool:
    """Whether keys and values have the same head groups."""
    return pool[0].energy.shape == pool[1].energy.shape


def _where_coded(values: Units, keys: Sequence[Ints]) -> Units:
    """Values that nothing is lost by where the keys [n, C] of the same class and head group have no bits."""
    coded = np.concatenate([widths.reshape(-1, values.energy.shape[1]) for widths in keys])
    if coded.shape != values.energy.shape:
        return values
    some = (coded > 0).sum(1) > 0
    return Units(np.where(some[:, None], values.energy, 0.0), values.tokens)


def _summed(errors: Floats) -> Floats:
    return np.array([math.fsum(row) for row in errors])


def _classes(
    values: Mapping[Side, Sequence[Floats]], costs: Sequence[Mapping[Side, Floats]], rule: TileRule
) -> TokenClasses:
    """What a Plan says of its classes: quotas, and what noise that costs the average token alike costs each."""
    layers = len(costs)
    found = {
        side: np.array(
            [
                [math.fsum(energies.ravel() * row) / max(math.fsum(energies.ravel()), 1e-300) for row in cost[side]]
                for energies, cost in zip(values[side], costs, strict=True)
            ]
        )
        for side in SIDES
    }
    return TokenClasses(np.zeros((layers, 0)), np.tile(np.array(rule.quotas), (layers, 1)), found)
