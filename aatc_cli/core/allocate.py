"""Bit allocation: exact integer water-filling over channels, and the continuous solution that bounds it.

Everything is float64 numpy on the host with total orders and explicit tie-breaks, so a plan is a function of its
inputs alone: not of the machine, the thread count or the torch version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import SIDES, Side
from aatc_cli.core.lloyd import DISTORTION
from aatc_cli.errors import AatcError
from aatc_cli.profiles import Recipe

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SiteEnergy:
    """What allocation knows of one site, all [C] float64: latent variances, the paper's weights, the Fisher weights."""

    variance: Floats
    weight: Floats
    fisher: Floats | None = None


Energies = list[dict[Side, SiteEnergy]]


@dataclass(frozen=True)
class Allocation:
    """Widths per layer and side, and the distortion sum of w sigma^2 4^-b they are predicted to leave."""

    bits: list[dict[Side, Ints]]
    predicted: dict[Side, float]
    water_level: dict[Side, float]


def exponential_curves(energy: Floats, max_bits: int) -> Floats:
    """Distortion of every channel at every width: energy * 4^-b (paper, Eq. waterfilling-keys). [n] -> [n, max + 1]."""
    return energy[:, None] * quarter_powers(np.arange(max_bits + 1))


def quarter_powers(bits: Ints) -> Floats:
    """4^-b, exactly (a power of two by exponent arithmetic, so no machine's pow can differ)."""
    return np.ldexp(1.0, -2 * bits)


def channel_curves(energy: Floats, recipe: Recipe) -> Floats:
    """Distortion of every channel at every width under the recipe's quantizer model. [n] -> [n, max_bits + 1]."""
    if recipe.curve == "lloyd":
        curves: Floats = energy[:, None] * np.array(DISTORTION[: recipe.max_bits + 1])
        return curves
    return exponential_curves(energy, recipe.max_bits)


def waterfill(curves: Floats, budget: int, min_bits: int = 0) -> Ints:
    """Widths minimising the summed distortion under ``sum(bits) <= budget``; exact for convex falling curves.

    curves [n, widths] gives each channel's distortion at 0, 1, ... bits. Marginal gains are spent in falling order;
    for convex curves that is optimal. Ties go to the lower channel index. Bits that gain nothing are not spent.
    Raises `AatcError` when ``min_bits`` everywhere already exceeds the budget.
    """
    channels, widths = curves.shape
    spare = budget - min_bits * channels
    if spare < 0:
        raise AatcError(
            f"a budget of {budget} bits cannot give {channels} channels {min_bits} bits each",
            "raise the budget or lower min_bits in the recipe",
        )
    gains = (curves[:, min_bits:-1] - curves[:, min_bits + 1 :]).ravel()
    order = np.argsort(-gains, kind="stable")[:spare]
    taken = order[gains[order] > 0]
    counts = np.bincount(taken // (widths - 1 - min_bits), minlength=channels)
    return (min_bits + counts).astype(np.int64)


def reverse_waterfill(energy: Floats, budget: float) -> tuple[Floats, float]:
    """Continuous reverse water-filling (paper, Eq. bit-allocation): widths b* = max(0, log4(energy / level)), level.

    Its distortion is the lower bound of every integer allocation with the same budget. Zero-energy channels get
    nothing; with no energy at all the level is 0.
    """
    positive = np.sort(energy[energy > 0])[::-1]
    if positive.size == 0:
        return np.zeros_like(energy), 0.0
    logs = np.log2(positive) / 2
    # with the n largest channels under water, sum(logs) - n * log_level = budget; n = 1 always qualifies, also when the
    # budget is zero or too small to move the logarithm
    candidates = (np.cumsum(logs) - budget) / np.arange(1, logs.size + 1)
    log_level = candidates[np.flatnonzero(logs >= candidates)[-1]]
    bits = np.zeros_like(energy)
    bits[energy > 0] = np.maximum(np.log2(energy[energy > 0]) / 2 - log_level, 0.0)
    return bits, float(4.0**log_level)


def normalized_energy(site: SiteEnergy, side: Side, recipe: Recipe) -> Floats:
    """w sigma^2 of every channel of a site under the recipe's weights and normalisation. -> [C].

    Variances, and query weights of keys, are divided by the layer's own percentile ("Experimental Setting ... AATC").
    """
    chosen = recipe.key_weight if side == "k" else recipe.value_weight
    if chosen == "fisher":
        if site.fisher is None or not site.fisher.any():
            raise AatcError(
                f"recipe {recipe.name} weighs by loss gradients, and the transform holds none",
                "collect with --fisher N (64 windows or more serve well), then whiten again",
            )
        return site.variance * site.fisher
    energy = _normalized(site.variance, recipe.normalize_percentile)
    if side == "k" and recipe.key_weight == "query":
        energy = energy * _normalized(site.weight, recipe.normalize_percentile)
    if side == "v" and recipe.value_weight == "output":
        energy = energy * site.weight
    return energy


def allocate(energies: Energies, recipe: Recipe, bits_per_channel: float) -> Allocation:
    """Widths for every site at an average of ``bits_per_channel``, for keys and values apart or over both.

    Raises `AatcError` when the budget cannot pay the recipe's protected layers.
    """
    if recipe.pool == "joint":
        return _allocate_jointly(energies, recipe, bits_per_channel)
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    levels: dict[Side, float] = {}
    for side in SIDES:
        values = [normalized_energy(layer[side], side, recipe) for layer in energies]
        extra = recipe.protect.key_extra if side == "k" else recipe.protect.value_extra
        pool_budget, protected = _budgets(values, recipe, bits_per_channel, extra)
        for layer, budget in enumerate(protected):
            bits[layer][side] = _fill(values[layer], budget, recipe)
        pool = values[len(protected) :]
        for layer, widths in enumerate(_fill_pool(pool, pool_budget, recipe), start=len(protected)):
            bits[layer][side] = widths
        predicted[side] = _predicted(values, [layer[side] for layer in bits], recipe)
        levels[side] = reverse_waterfill(np.concatenate(pool), pool_budget)[1] if pool else 0.0
    return Allocation(bits, predicted, levels)


def _allocate_jointly(energies: Energies, recipe: Recipe, average: float) -> Allocation:
    """One water level over keys and values of all layers."""
    values = {side: [normalized_energy(layer[side], side, recipe) for layer in energies] for side in SIDES}
    pool = [*values["k"], *values["v"]]
    budget = int(np.floor(average * sum(energy.size for energy in pool) + 1e-9))
    widths = _fill_pool(pool, budget, recipe)
    keys, others = widths[: len(energies)], widths[len(energies) :]
    bits: list[dict[Side, Ints]] = [{"k": k, "v": v} for k, v in zip(keys, others, strict=True)]
    level = reverse_waterfill(np.concatenate(pool), budget)[1]
    predicted = {side: _predicted(values[side], [layer[side] for layer in bits], recipe) for side in SIDES}
    return Allocation(bits, predicted, {"k": level, "v": level})


def _predicted(energies: list[Floats], bits: list[Ints], recipe: Recipe) -> float:
    """Sum of the curves at the widths; exactly rounded, so that the order of summation does not matter."""
    pairs = zip(energies, bits, strict=True)
    if recipe.curve == "lloyd":
        table = np.array(DISTORTION)
        return math.fsum(math.fsum(energy * table[widths]) for energy, widths in pairs)
    return math.fsum(math.fsum(energy * quarter_powers(widths)) for energy, widths in pairs)


def _budgets(values: list[Floats], recipe: Recipe, average: float, extra: float) -> tuple[int, list[int]]:
    channels = [value.size for value in values]
    total = int(np.floor(average * sum(channels) + 1e-9))
    count = min(recipe.protect.layers, len(values))
    protected = [int(np.floor(min(average + extra, recipe.max_bits) * size + 1e-9)) for size in channels[:count]]
    left = total - sum(protected)
    if left < 0:
        raise AatcError(
            f"{average:g} bits over {len(values)} layers cannot pay for {count} protected layers "
            f"at {average + extra:g} bits",
            "raise the budget, or use a recipe with fewer protected layers ([protect] layers = 0)",
        )
    return left, protected


def _fill(energy: Floats, budget: int, recipe: Recipe) -> Ints:
    if recipe.allocator == "uniform":
        return _even(energy.size, budget, recipe.max_bits)
    return waterfill(channel_curves(energy, recipe), budget, recipe.min_bits)


def _even(channels: int, budget: int, max_bits: int) -> Ints:
    """The same width everywhere; what does not divide goes to the leading channels, one bit each."""
    base, rest = divmod(min(budget, channels * max_bits), channels)
    return base + (np.arange(channels) < rest).astype(np.int64)


def _fill_pool(pool: list[Floats], budget: int, recipe: Recipe) -> list[Ints]:
    if not pool:
        return []
    if recipe.allocator in ("per-layer", "uniform"):
        return [_fill(energy, share, recipe) for energy, share in zip(pool, _shares(pool, budget), strict=True)]
    if recipe.allocator == "global":
        profile = _fill(np.mean(np.stack(pool), axis=0), budget // len(pool), recipe)
        return [profile.copy() for _ in pool]
    widths = _fill(np.concatenate(pool), budget, recipe)
    return np.split(widths, np.cumsum([energy.size for energy in pool])[:-1])


def _shares(pool: list[Floats], budget: int) -> list[int]:
    edges = [budget * i // len(pool) for i in range(len(pool) + 1)]
    return [high - low for low, high in pairwise(edges)]


def _normalized(values: Floats, percentile: float | None) -> Floats:
    if percentile is None:
        return values
    level = float(np.percentile(values, percentile))
    if level <= 0:
        level = float(values.max()) if values.size and values.max() > 0 else 1.0
    return values / level
