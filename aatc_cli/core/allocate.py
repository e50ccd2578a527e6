"""Bit allocation: exact integer water-filling over channels, and the continuous solution that bounds it.

Everything is float64 numpy on the host with total orders and explicit tie-breaks, so a plan is a function of its
inputs alone: not of the machine, the thread count or the torch version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from aatc_cli.config import MAX_BITS, HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.lloyd import DISTORTION, DISTORTION_UNIFORM
from aatc_cli.core.token_classes import TokenClasses
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TABLES = {"lloyd": DISTORTION, "uniform": DISTORTION_UNIFORM}


@dataclass(frozen=True)
class SiteEnergy:
    """What allocation knows of one site, all [C] float64: latent variances, the paper's weights, the Fisher weights."""

    variance: Floats
    weight: Floats
    fisher: Floats | None = None


Energies = list[dict[Side, SiteEnergy]]


@dataclass(frozen=True)
class Allocation:
    """Widths per layer and side, and what they are predicted to leave: the sum of the recipe's curves at the widths.

    starts: of recipes that code blocks of one precision, 1 where a block begins, else 0; the same shapes as ``bits``.
    classes: of recipes with token rates; the widths of a site are then [n, C], one row for each of n classes.
    With Fisher weights ``predicted`` is the divergence (KL) from the uncompressed model in nats per position, to second
    order.
    """

    bits: list[dict[Side, Ints]]
    predicted: dict[Side, float]
    water_level: dict[Side, float]
    starts: list[dict[Side, Ints]] | None = None
    classes: TokenClasses | None = None


def exponential_curves(energy: Floats, max_bits: int) -> Floats:
    """Distortion of every channel at every width: energy * 4^-b (paper, Eq. waterfilling-keys). [n] -> [n, max + 1]."""
    return energy[:, None] * quarter_powers(np.arange(max_bits + 1))


def quarter_powers(bits: Ints) -> Floats:
    """4^-b, exactly (a power of two by exponent arithmetic, so no machine's pow can differ)."""
    return np.ldexp(1.0, -2 * bits)


def channel_curves(energy: Floats, recipe: Recipe) -> Floats:
    """Distortion of every channel at every width under the recipe's quantizer model. [n] -> [n, max_bits + 1]."""
    if recipe.curve == "exponential":
        return exponential_curves(energy, recipe.max_bits)
    curves: Floats = energy[:, None] * np.array(_TABLES[recipe.curve][: recipe.max_bits + 1])
    return curves


def waterfill(
    curves: Floats, budget: int, min_bits: int = 0, widths: Sequence[int] | None = None, prices: Ints | None = None
) -> Ints:
    """Widths minimising the summed distortion under ``sum(bits) <= budget``; exact for convex falling curves.

    curves [n, max + 1] gives each channel's distortion at 0, 1, ... bits; ``widths`` are those that may be used, rising
    (None: all from ``min_bits``). Gains per bit are spent in falling order, ties to the lower channel; bits that gain
    nothing are not spent. Where widths lie more than a bit apart the steps that no longer fit are passed over; what is
    bought before the first of them is still the best use of what it costs.
    prices [n]: what one bit of a channel takes from the budget, 1 each unless given; the curves are of one of so many
    alike, so that prices[c] times the curve of c is minimised. Steps that do not fit are passed over in the same way.
    Raises `AatcError` when the narrowest width everywhere already exceeds the budget.
    """
    channels = curves.shape[0]
    allowed = np.asarray(widths if widths is not None else range(min_bits, curves.shape[1]), dtype=np.int64)
    each = np.ones(channels, dtype=np.int64) if prices is None else prices
    spare = _spare(budget, int(each.sum()), int(allowed[0]))
    steps = np.diff(allowed)
    gains = ((curves[:, allowed[:-1]] - curves[:, allowed[1:]]) / steps).ravel()
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0]
    spent = np.cumsum(steps[order % steps.size] * each[order // steps.size]) if steps.size else order
    fitting = int(np.searchsorted(spent, spare, side="right"))
    counts = np.bincount(order[:fitting] // max(steps.size, 1), minlength=channels)
    if fitting < order.size and steps.max() * each.max() > 1:
        _fill_rest(counts, order[fitting:], steps, each, spare - int(spent[fitting - 1] if fitting else 0))
    return allowed[counts]


def _spare(budget: int, channels: int, narrowest: int) -> int:
    spare = budget - narrowest * channels
    if spare < 0:
        raise AatcError(
            f"a budget of {budget} bits cannot give {channels} channels {narrowest} bits each",
            "raise the budget or lower min_bits in the recipe",
        )
    return spare


def _fill_rest(counts: Ints, order: Ints, steps: Ints, prices: Ints, spare: int) -> None:
    """Take further steps, best first, while they fit into ``spare`` bits; a channel takes its steps in turn."""
    for place in order[steps[order % steps.size] * prices[order // steps.size] <= spare]:
        channel, step = divmod(int(place), steps.size)
        cost = int(steps[step] * prices[channel])
        if counts[channel] == step and cost <= spare:
            counts[channel] += 1
            spare -= cost
            if spare == 0:
                return


def reverse_waterfill(energy: Floats, budget: float, prices: Ints | None = None) -> tuple[Floats, float]:
    """Continuous reverse water-filling (paper, Eq. bit-allocation): widths b* = max(0, log4(energy / level)), level.

    Its distortion is the lower bound of every integer allocation with the same budget. Zero-energy channels get
    nothing; with no energy at all the level is 0. ``prices`` as in `waterfill`.
    """
    each = np.ones(energy.size, dtype=np.int64) if prices is None else prices
    falling = np.argsort(-energy, kind="stable")[: int((energy > 0).sum())]
    if falling.size == 0:
        return np.zeros_like(energy), 0.0
    logs, paid = np.log2(energy[falling]) / 2, each[falling]
    # with the n largest channels under water, sum(logs) - n * log_level = budget; n = 1 always qualifies, also when the
    # budget is zero or too small to move the logarithm
    candidates = (np.cumsum(paid * logs) - budget) / np.cumsum(paid)
    log_level = candidates[np.flatnonzero(logs >= candidates)[-1]]
    bits = np.zeros_like(energy)
    bits[energy > 0] = np.maximum(np.log2(energy[energy > 0]) / 2 - log_level, 0.0)
    return bits, float(4.0**log_level)


def normalized_energy(site: SiteEnergy, side: Side, recipe: Recipe) -> Floats:
    """w sigma^2 of every channel of a site under the recipe's weights and normalisation. -> [C].

    With Fisher weights it is half of that, which is in nats per position: the divergence that losing the channel costs.
    Variances, and query weights of keys, are divided by the layer's own percentile ("Experimental Setting ... AATC").
    """
    chosen = recipe.key_weight if side == "k" else recipe.value_weight
    if chosen == "fisher":
        if site.fisher is None or not site.fisher.any():
            raise AatcError(
                f"recipe {recipe.name} weighs by loss gradients, and the transform holds none",
                "collect with --fisher N (64 windows or more serve well), then whiten again",
            )
        return 0.5 * site.variance * site.fisher
    energy = _normalized(site.variance, recipe.normalize_percentile)
    if side == "k" and recipe.key_weight == "query":
        energy = energy * _normalized(site.weight, recipe.normalize_percentile)
    if side == "v" and recipe.value_weight == "output":
        energy = energy * site.weight
    return energy


def require_blocks(recipe: Recipe, channels: int, groups: HeadGroups) -> None:
    """Raise `AatcError` unless the recipe's blocks fill the head groups of sites of ``channels`` C."""
    for size in {channels // groups.of(side) for side in SIDES}:
        if size % recipe.block:
            raise AatcError(
                f"recipe {recipe.name} gives one width to {recipe.block} channels at a time, "
                f"which do not divide the {size} of a head group",
                "set block in the recipe to a divisor of that number, or choose other head groups",
            )


def channel_blocks(energy: Floats, block: int) -> Ints:
    """Channels of every head group by falling energy, ties to the lower one, cut into blocks.

    energy [groups, E], E a multiple of ``block``. -> indices of the channels of a site, [groups E / block, block].
    """
    order = np.argsort(-energy, axis=1, kind="stable")
    starts = energy.shape[1] * np.arange(energy.shape[0])
    blocks: Ints = (order + starts[:, None]).reshape(-1, block)
    return blocks


def allocate(
    energies: Energies, recipe: Recipe, bits_per_channel: float, groups: HeadGroups | None = None
) -> Allocation:
    """Widths for every site at an average of ``bits_per_channel``, for keys and values apart or over both.

    ``groups`` are the Transform's head groups, inside which blocks are formed (None: one of each).
    Raises `AatcError` when the budget cannot pay the recipe's protected layers or blocks do not fill head groups.
    """
    groups = groups or HeadGroups.both(1)
    require_blocks(recipe, energies[0]["k"].variance.size, groups)
    if recipe.pool == "joint":
        return _allocate_jointly(energies, recipe, bits_per_channel, groups)
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    levels: dict[Side, float] = {}
    for side in SIDES:
        values = _grouped(energies, side, recipe, groups)
        extra = recipe.protect.key_extra if side == "k" else recipe.protect.value_extra
        pool_budget, protected = _budgets(values, recipe, bits_per_channel, extra)
        for layer, budget in enumerate(protected):
            bits[layer][side] = fill_sites(values[layer : layer + 1], budget, recipe)[0]
        pool = values[len(protected) :]
        for layer, widths in enumerate(_fill_pool(pool, pool_budget, recipe), start=len(protected)):
            bits[layer][side] = widths
        predicted[side] = _predicted(values, [layer[side] for layer in bits], recipe)
        levels[side] = reverse_waterfill(_flat(pool), pool_budget)[1] if pool else 0.0
    return Allocation(bits, predicted, levels)


def _allocate_jointly(energies: Energies, recipe: Recipe, average: float, groups: HeadGroups) -> Allocation:
    """One water level over keys and values of all layers."""
    values = {side: _grouped(energies, side, recipe, groups) for side in SIDES}
    pool = [*values["k"], *values["v"]]
    budget = int(np.floor(average * sum(energy.size for energy in pool) + 1e-9))
    widths = _fill_pool(pool, budget, recipe)
    keys, others = widths[: len(energies)], widths[len(energies) :]
    bits: list[dict[Side, Ints]] = [{"k": k, "v": v} for k, v in zip(keys, others, strict=True)]
    level = reverse_waterfill(_flat(pool), budget)[1]
    predicted = {side: _predicted(values[side], [layer[side] for layer in bits], recipe) for side in SIDES}
    return Allocation(bits, predicted, {"k": level, "v": level})


def _predicted(energies: list[Floats], bits: list[Ints], recipe: Recipe) -> float:
    """Sum of the curves at the widths; exactly rounded, so that the order of summation does not matter."""
    powers = quarter_powers(np.arange(MAX_BITS + 1))
    table = np.array(_TABLES[recipe.curve]) if recipe.curve in _TABLES else powers
    pairs = zip(energies, bits, strict=True)
    return math.fsum(math.fsum(energy.ravel() * table[widths]) for energy, widths in pairs)


def _grouped(energies: Energies, side: Side, recipe: Recipe, groups: HeadGroups) -> list[Floats]:
    """Energies of one side of every layer, by head group: [groups, E] each."""
    return [normalized_energy(layer[side], side, recipe).reshape(groups.of(side), -1) for layer in energies]


def _flat(pool: list[Floats]) -> Floats:
    return np.concatenate([energy.ravel() for energy in pool])


def _budgets(values: list[Floats], recipe: Recipe, average: float, extra: float) -> tuple[int, list[int]]:
    channels = [value.size for value in values]
    total = int(np.floor(average * sum(channels) + 1e-9))
    count = min(recipe.protect.layers, len(values))
    blocks = [size // recipe.block for size in channels[:count]]
    # what would not fill a block is left to the pool
    protected = [recipe.block * int(np.floor(min(average + extra, recipe.max_bits) * size + 1e-9)) for size in blocks]
    left = total - sum(protected)
    if left < 0:
        raise AatcError(
            f"{average:g} bits over {len(values)} layers cannot pay for {count} protected layers "
            f"at {average + extra:g} bits",
            "raise the budget, or use a recipe with fewer protected layers ([protect] layers = 0)",
        )
    return left, protected


def fill_sites(pool: list[Floats], budget: int, recipe: Recipe, prices: Sequence[int] | None = None) -> list[Ints]:
    """Widths [C] of sites with energies [groups, E] out of one budget; ``prices`` of the sites as in `waterfill`.

    A block is one channel to water-filling: the sum of its channels' curves, at ``block`` times the price of a bit.
    """
    energy, edges = _flat(pool), np.cumsum([0, *(site.size for site in pool)])
    each = np.repeat(np.asarray(prices or [1] * len(pool), dtype=np.int64), [site.size for site in pool])
    budget -= budget % recipe.block
    _spare(budget, int(each.sum()), recipe.allowed_widths[0])
    blocks = np.concatenate([start + _blocks(site, recipe) for start, site in zip(edges[:-1], pool, strict=True)])
    if recipe.allocator == "uniform":
        widths = _even(len(blocks), budget // recipe.block, recipe)
    else:
        # exactly rounded, so that no order of summation matters
        sums = np.array([math.fsum(energies) for energies in energy[blocks]])
        widths = waterfill(
            channel_curves(sums, recipe),
            budget // recipe.block,
            widths=recipe.allowed_widths,
            prices=each[blocks[:, 0]],
        )
    found = np.empty(energy.size, dtype=np.int64)
    found[blocks] = widths[:, None]
    return np.split(found, edges[1:-1])


def _blocks(site: Floats, recipe: Recipe) -> Ints:
    if recipe.block == 1 or recipe.allocator == "uniform":
        return np.arange(site.size).reshape(-1, recipe.block)
    return channel_blocks(site, recipe.block)


def _even(channels: int, budget: int, recipe: Recipe) -> Ints:
    """The same width everywhere; what does not divide goes to the leading channels, one step each."""
    allowed = recipe.allowed_widths
    _spare(budget, channels, allowed[0])
    base = max(width for width in allowed if width * channels <= budget)
    wider = next((width for width in allowed if width > base), None)
    raised = 0 if wider is None else (budget - base * channels) // (wider - base)
    return np.where(np.arange(channels) < raised, wider or 0, base).astype(np.int64)


def _fill_pool(pool: list[Floats], budget: int, recipe: Recipe) -> list[Ints]:
    if not pool:
        return []
    if recipe.allocator in ("per-layer", "uniform"):
        shares = [recipe.block * share for share in _shares(pool, budget // recipe.block)]
        return [fill_sites([energy], share, recipe)[0] for energy, share in zip(pool, shares, strict=True)]
    if recipe.allocator == "global":
        profile = fill_sites([np.mean(np.stack(pool), axis=0)], budget // len(pool), recipe)[0]
        return [profile.copy() for _ in pool]
    return fill_sites(pool, budget, recipe)


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
