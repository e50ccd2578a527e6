"""A plan of tiles from energies and costs by class: widths of every site, and what they are predicted to leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Floats, Ints
from aatc_cli.core.stepped_plan import allocate_steps
from aatc_cli.core.tile_allocate import allocate_planes
from aatc_cli.core.tile_bytes import order_bytes
from aatc_cli.core.tile_floor import allocate_floored
from aatc_cli.core.tile_options import Units
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.token_classes import TokenClasses


@dataclass(frozen=True)
class TileBudget:
    """What a plan may spend: ``average`` bits a number with all that a tile holds, token scales of ``scale_bits``.

    floor: least bits of a number of the lowest class, scales and padding counted. expected: bits that codes of each
    width take where they have no fixed size; then there are neither planes nor scales.
    """

    average: float
    scale_bits: int
    floor: float = 0.0
    expected: Sequence[float] | None = None


def plan_tiles(
    values: Mapping[Side, Sequence[Floats]],
    costs: Sequence[Mapping[Side, Floats]],
    budget: TileBudget,
    curve: Floats,
    rule: TileRule,
    heads: int,
    *,
    joint: bool,
    alone: bool = False,
) -> Allocation:
    """Widths [n, C] of every layer and side within ``budget``.

    values[side][layer] [groups, E]: energies of the average token; costs[layer][side] [n, C]: of tokens of each class,
    relative to it. heads: that rank their tokens each by itself. joint: one budget for keys and values, or two halves.
    alone: values may be coded where keys are not. Raises `AatcError` for a budget that does not pay for the classes or
    the floor.
    """
    layers, channels = len(costs), values["k"][0].size
    whole = math.floor(budget.average * rule.tile * 2 * channels * layers + 1e-9)
    room = whole - 8 * layers * order_bytes(rule, heads)
    bits: list[dict[Side, Ints]] = [{} for _ in range(layers)]
    levels: dict[Side, float] = {}
    left: dict[Side, list[float]] = {side: [] for side in SIDES}
    pools: tuple[tuple[Side, ...], ...] = (SIDES,) if joint else tuple((side,) for side in SIDES)
    for sides in pools:
        pool = [_units(values[side], [layer[side] for layer in costs], rule) for side in sides]
        if sides == ("v",):
            pool = [_where_coded(pool[0], [layer["k"] for layer in bits])]
        share, follow = room // len(pools), joint and not alone and _alike(pool)

        def buy(units: Sequence[Units], share: int = share, follow: bool = follow) -> tuple[list[Ints], float]:
            if budget.expected is not None:
                return allocate_steps(units, share, curve, np.array(budget.expected)[: curve.size])
            return allocate_planes(units, share, curve, budget.scale_bits, follow=follow)

        least = math.ceil(budget.floor * rule.quotas[0] * len(pool) * channels * layers)
        lowest = [_in_lowest(units, rule, layers) for units in pool]
        widths, level = allocate_floored(pool, lowest, least, budget.scale_bits, buy)
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


def _in_lowest(units: Units, rule: TileRule, layers: int) -> NDArray[np.bool_]:
    """Which units are of the first class: bool [U], in the order of `_units`."""
    groups = len(units.tokens) // (layers * rule.classes)
    return np.tile(np.repeat(np.arange(rule.classes) == 0, groups), layers)


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
    found = {
        side: np.array(
            [
                [math.fsum(energies.ravel() * row) / max(math.fsum(energies.ravel()), 1e-300) for row in cost[side]]
                for energies, cost in zip(values[side], costs, strict=True)
            ]
        )
        for side in SIDES
    }
    return TokenClasses(rule.quotas, found)
