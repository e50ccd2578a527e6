"""Resolutions of codes without a fixed size: bought in falling order of what a bit saves, over all channels at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.tile_options import Units

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def allocate_steps(pool: Sequence[Units], budget: float, curve: Floats, bits: Floats) -> tuple[list[Ints], float]:
    """Resolutions [U, E] of every part of the pool within ``budget`` expected bits of a tile; the level in nats a bit.

    curve, bits [W]: error and expected bits of a channel of energy 1. All channels go along the same lower convex hull
    of error over bits, so taking steps by what a bit saves is exact; ties go to the channel that stands first.
    """
    hull = lower_hull(bits, curve)
    more = np.diff(bits[hull])
    saved = (curve[hull[:-1]] - curve[hull[1:]]) / more
    energy = np.concatenate([units.energy.ravel() for units in pool])
    tokens = np.concatenate([np.repeat(units.tokens, units.energy.shape[1]) for units in pool])
    gains = (energy[:, None] * saved).ravel()
    costs = (tokens[:, None] * more).ravel()
    order = np.argsort(-gains, kind="stable")
    spent = np.cumsum(costs[order])
    count = int(np.searchsorted(spent, budget, side="right"))
    # what saves nothing is not bought
    count = min(count, int((gains > 0).sum()))
    taken = np.zeros(gains.size, dtype=np.int64)
    taken[order[:count]] = 1
    steps = taken.reshape(energy.size, -1).sum(1)
    level = float(gains[order[count]]) if count < gains.size else 0.0
    found, start = [], 0
    for units in pool:
        stop = start + units.energy.size
        found.append(hull[steps[start:stop]].reshape(units.energy.shape))
        start = stop
    return found, level


def lower_hull(bits: Floats, curve: Floats) -> Ints:
    """Places on the lower convex hull of ``curve`` over rising ``bits``."""
    path: list[int] = []
    for place in range(bits.size):
        if path and curve[place] >= curve[path[-1]]:
            continue
        while len(path) > 1:
            a, b = path[-2], path[-1]
            steep = (curve[a] - curve[b]) * (bits[place] - bits[b])
            if steep > (curve[b] - curve[place]) * (bits[b] - bits[a]):
                break
            path.pop()
        path.append(place)
    return np.array(path, dtype=np.int64)
