"""Allocators of published methods: one width, ranks by importance, a width per head, blocks of falling precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.config import HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import (
    Allocation,
    Energies,
    Floats,
    Ints,
    SiteEnergy,
    allocate,
    normalized_energy,
    quarter_powers,
    waterfill,
)
from aatc_cli.core.head_rates import WIDEST, fitted_curves
from aatc_cli.core.precision_blocks import SIZES, WIDTHS, Block, block_widths, choose_blocks
from aatc_cli.core.ranks import proportional_ranks, rounded_rank
from aatc_cli.core.token_classes import TokenClasses
from aatc_cli.core.token_rates import allocate_classes
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe


@dataclass(frozen=True)
class MethodTables:
    """What some allocators need of a Transform beside `Energies`.

    sites: per layer and side the errors per head [H, 9] or those of blocks. joint: per side the energy [q] of latents
    over all layers and the errors of their blocks. classes: of tokens, for recipes with token rates.
    """

    sites: list[dict[Side, Floats]] | None = None
    joint: dict[Side, tuple[Floats, Floats]] | None = None
    classes: TokenClasses | None = None


def allocate_any(
    energies: Energies, recipe: Recipe, bits_per_channel: float, groups: HeadGroups, tables: MethodTables
) -> Allocation:
    """Widths for every site under any allocator of a recipe, at an average of ``bits_per_channel``.

    Raises `AatcError` when the budget cannot be met, or the transform lacks what the allocator weighs by.
    """
    if recipe.tokens is not None:
        assert tables.classes is not None
        return allocate_classes(energies, recipe, bits_per_channel, groups, tables.classes)
    if recipe.allocator == "one-width":
        return _one_width(energies, recipe, bits_per_channel)
    if recipe.allocator == "rank":
        return _ranks(energies, recipe, bits_per_channel, groups)
    if recipe.allocator == "per-head":
        return _per_head(energies, recipe, bits_per_channel, tables)
    if recipe.allocator == "block-dp":
        return (
            _joint_blocks(energies, bits_per_channel, tables)
            if tables.joint
            else _blocks(energies, bits_per_channel, tables)
        )
    return allocate(energies, recipe, bits_per_channel, groups)


def width_of(recipe: Recipe, bits: float) -> int:
    """The widest width that a recipe of one width may use within ``bits``; raises `AatcError` where there is none."""
    fitting = [width for width in recipe.allowed_widths if width <= bits + 1e-9 and width > 0]
    if not fitting:
        least = min(width for width in recipe.allowed_widths if width > 0)
        raise AatcError(f"recipe {recipe.name} begins at {least} bits, {bits:g} are too few", f"use --budget {least}")
    return max(fitting)


def _one_width(energies: Energies, recipe: Recipe, average: float) -> Allocation:
    width = width_of(recipe, average)
    bits: list[dict[Side, Ints]] = [
        {side: np.full(layer[side].variance.size, width, dtype=np.int64) for side in SIDES} for layer in energies
    ]
    return Allocation(bits, _squares(energies, bits, recipe), {"k": 0.0, "v": 0.0})


def _ranks(energies: Energies, recipe: Recipe, average: float, groups: HeadGroups) -> Allocation:
    """Kept latents of one width in proportion to the root of what gradients say of a site (Palu, "fisher_uniform")."""
    places: list[tuple[int, Side]] = [(layer, side) for side in SIDES for layer in range(len(energies))]
    channels = energies[0]["k"].variance.size
    importance = np.array([_gradient_energy(energies[layer][side], recipe) for layer, side in places]) ** 0.5
    total = math.floor(average / recipe.max_bits * channels * len(places) + 1e-9)
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    for (layer, side), rank in zip(places, proportional_ranks(importance, channels, total), strict=True):
        count = groups.of(side)
        size = channels // count
        kept = rounded_rank(rank, count, size, recipe.coding.rank_multiple)
        bits[layer][side] = np.tile(np.where(np.arange(size) < kept, recipe.max_bits, 0), count).astype(np.int64)
    return Allocation(bits, _squares(energies, bits, recipe), {"k": 0.0, "v": 0.0})


def _gradient_energy(site: SiteEnergy, recipe: Recipe) -> float:
    """Sum of squared loss gradients of a site: the trace of M, from its weights in latent coordinates."""
    if site.fisher is None or not site.fisher.any():
        raise AatcError(
            f"recipe {recipe.name} ranks by loss gradients, and the transform holds none",
            "collect with --fisher N (64 windows or more serve well), then whiten again",
        )
    alive = site.variance > 0
    # rows of the decode matrix are unit vectors times the root of the latent's second moment
    return math.fsum(site.fisher[alive] / site.variance[alive])


def _per_head(energies: Energies, recipe: Recipe, average: float, tables: MethodTables) -> Allocation:
    assert tables.sites is not None
    widths = tuple(width for width in recipe.allowed_widths if width <= WIDEST)
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    for side in SIDES:
        curves = np.concatenate(
            [
                _head_curves(layer[side], table[side], side, recipe)
                for layer, table in zip(energies, tables.sites, strict=True)
            ]
        )
        heads = curves.shape[0] // len(energies)
        chosen = waterfill(curves, math.floor(average * curves.shape[0] + 1e-9), widths=widths)
        size = energies[0][side].variance.size // heads
        for layer, row in enumerate(chosen.reshape(len(energies), heads)):
            bits[layer][side] = np.repeat(row, size)
        predicted[side] = size * math.fsum(curves[np.arange(curves.shape[0]), chosen])
    return Allocation(bits, predicted, {"k": 0.0, "v": 0.0})


def _head_curves(site: SiteEnergy, errors: Floats, side: Side, recipe: Recipe) -> Floats:
    """The fitted curve of every head of a site, per channel, times what its noise costs by the recipe's weight."""
    energy = normalized_energy(site, side, recipe)
    heads = errors.shape[0]
    alive = site.variance > 0
    weight = np.where(alive, energy / np.where(alive, site.variance, 1.0), 0.0).reshape(heads, -1).mean(1)
    curves: Floats = fitted_curves(errors, recipe.allowed_widths[0]) * weight[:, None]
    return curves


def _blocks(energies: Energies, average: float, tables: MethodTables) -> Allocation:
    assert tables.sites is not None
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    starts: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    for side in SIDES:
        errors = []
        for layer, (site, table) in enumerate(zip(energies, tables.sites, strict=True)):
            variance = site[side].variance
            blocks = choose_blocks(table[side], variance, math.floor(average * variance.size + 1e-9))
            bits[layer][side], starts[layer][side] = _written(blocks, variance.size)
            errors.append(_left(blocks, table[side], variance))
        predicted[side] = math.fsum(errors)
    return Allocation(bits, predicted, {"k": 0.0, "v": 0.0}, starts)


def _joint_blocks(energies: Energies, average: float, tables: MethodTables) -> Allocation:
    """Latents over all layers, written down layer after layer, C to each."""
    assert tables.joint is not None
    layers, channels = len(energies), energies[0]["k"].variance.size
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    starts: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    for side in SIDES:
        energy, table = tables.joint[side]
        blocks = choose_blocks(table, energy, math.floor(average * layers * channels + 1e-9))
        widths, begins = _written(blocks, layers * channels)
        for layer in range(layers):
            span = slice(layer * channels, (layer + 1) * channels)
            bits[layer][side], starts[layer][side] = widths[span], begins[span]
        predicted[side] = _left(blocks, table, energy)
    return Allocation(bits, predicted, {"k": 0.0, "v": 0.0}, starts)


def _written(blocks: tuple[Block, ...], count: int) -> tuple[Ints, Ints]:
    widths, starts = block_widths(blocks, count)
    return np.array(widths, dtype=np.int64), np.array(starts, dtype=np.int64)


def _left(blocks: tuple[Block, ...], errors: NDArray[np.float64], energy: Floats) -> float:
    """Squared error per token of the blocks and of the latents behind them."""
    coded = sum(block.size for block in blocks)
    found = [float(errors[b.start // SIZES[0], SIZES.index(b.size), WIDTHS.index(b.bits)]) for b in blocks]
    return math.fsum([*found, *energy[coded:]])


def _squares(energies: Energies, bits: list[dict[Side, Ints]], recipe: Recipe) -> dict[Side, float]:
    """Sum of energy 4^-b over all channels, as for the recipes of the paper."""
    return {
        side: math.fsum(
            math.fsum(normalized_energy(layer[side], side, recipe) * quarter_powers(widths[side]))
            for layer, widths in zip(energies, bits, strict=True)
        )
        for side in SIDES
    }
