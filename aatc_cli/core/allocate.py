"""Bit allocation: exact integer water-filling over channels, and the continuous solution that bounds it.

Everything is float64 numpy on the host with total orders and explicit tie-breaks, so a plan is a function of its
inputs alone: not of the machine, the thread count or the torch version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import Side
from aatc_cli.core.token_classes import TokenClasses
from aatc_cli.errors import AatcError

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
    """Widths per layer and side, and what they are predicted to leave: the sum of the recipe's curves at the widths.

    starts: of recipes that code blocks of one precision, 1 where a block begins, else 0; the same shapes as ``bits``.
    classes: of recipes with tiles; the widths of a site are then [n, C], one row for each of n classes.
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


def waterfill(curves: Floats, budget: int, min_bits: int = 0, widths: Sequence[int] | None = None) -> Ints:
    """Widths minimising the summed distortion under ``sum(bits) <= budget``; exact for convex falling curves.

    curves [n, max + 1] gives each channel's distortion at 0, 1, ... bits; ``widths`` are those that may be used, rising
    (None: all from ``min_bits``). Gains per bit are spent in falling order, ties to the lower channel; bits that gain
    nothing are not spent. Where widths lie more than a bit apart the steps that no longer fit are passed over; what is
    bought before the first of them is still the best use of what it costs.
    Raises `AatcError` when the narrowest width everywhere already exceeds the budget.
    """
    channels = curves.shape[0]
    allowed = np.asarray(widths if widths is not None else range(min_bits, curves.shape[1]), dtype=np.int64)
    spare = spare_bits(budget, channels, int(allowed[0]))
    steps = np.diff(allowed)
    gains = ((curves[:, allowed[:-1]] - curves[:, allowed[1:]]) / steps).ravel()
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0]
    spent = np.cumsum(steps[order % steps.size]) if steps.size else order
    fitting = int(np.searchsorted(spent, spare, side="right"))
    counts = np.bincount(order[:fitting] // max(steps.size, 1), minlength=channels)
    if fitting < order.size and steps.max() > 1:
        _fill_rest(counts, order[fitting:], steps, spare - int(spent[fitting - 1] if fitting else 0))
    return allowed[counts]


def spare_bits(budget: int, channels: int, narrowest: int) -> int:
    """What is left of a budget when every channel has the narrowest width; raises `AatcError` where that is less."""
    spare = budget - narrowest * channels
    if spare < 0:
        raise AatcError(
            f"a budget of {budget} bits cannot give {channels} channels {narrowest} bits each",
            "raise the budget or lower min_bits in the recipe",
        )
    return spare


def _fill_rest(counts: Ints, order: Ints, steps: Ints, spare: int) -> None:
    """Take further steps, best first, while they fit into ``spare`` bits; a channel takes its steps in turn."""
    for place in order[steps[order % steps.size] <= spare]:
        channel, step = divmod(int(place), steps.size)
        cost = int(steps[step])
        if counts[channel] == step and cost <= spare:
            counts[channel] += 1
            spare -= cost
            if spare == 0:
                return


def reverse_waterfill(energy: Floats, budget: float) -> tuple[Floats, float]:
    """Continuous reverse water-filling (paper, Eq. bit-allocation): widths b* = max(0, log4(energy / level)), level.

    Its distortion is the lower bound of every integer allocation with the same budget. Zero-energy channels get
    nothing; with no energy at all the level is 0.
    """
    falling = np.argsort(-energy, kind="stable")[: int((energy > 0).sum())]
    if falling.size == 0:
        return np.zeros_like(energy), 0.0
    logs = np.log2(energy[falling]) / 2
    # with the n largest channels under water, sum(logs) - n * log_level = budget; n = 1 always qualifies, also when the
    # budget is zero or too small to move the logarithm
    candidates = (np.cumsum(logs) - budget) / np.arange(1, logs.size + 1)
    log_level = candidates[np.flatnonzero(logs >= candidates)[-1]]
    bits = np.zeros_like(energy)
    bits[energy > 0] = np.maximum(np.log2(energy[energy > 0]) / 2 - log_level, 0.0)
    return bits, float(4.0**log_level)


def channel_blocks(energy: Floats, block: int) -> Ints:
    """Channels of every head group by falling energy, ties to the lower one, cut into blocks.

    energy [groups, E], E a multiple of ``block``. -> indices of the channels of a site, [groups E / block, block].
    """
    order = np.argsort(-energy, axis=1, kind="stable")
    starts = energy.shape[1] * np.arange(energy.shape[0])
    blocks: Ints = (order + starts[:, None]).reshape(-1, block)
    return blocks


def over_percentile(values: Floats, percentile: float | None) -> Floats:
    """``values`` over their own ``percentile``, or over the largest where that is zero; None leaves them alone."""
    if percentile is None:
        return values
    level = float(np.percentile(values, percentile))
    if level <= 0:
        level = float(values.max()) if values.size and values.max() > 0 else 1.0
    return values / level
