"""Latent channels that every site of a low-rank cache keeps: shares of a total by importance, in multiples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def proportional_ranks(importance: Floats, full: int, total: int) -> list[int]:
    """Ranks of n sites in proportion to their ``importance`` [n], none above ``full``, summing to ``total`` at most.

    What a capped site cannot take is shared out again among the others in proportion, and the rest of rounding down
    goes to the most important sites that still have room, one each.
    """
    ranks = np.zeros(importance.size)
    free = np.ones(importance.size, dtype=bool)
    left = float(min(total, full * importance.size))
    while free.any():
        shares = importance[free] / importance[free].sum() if importance[free].sum() > 0 else 1.0 / free.sum()
        wanted = np.asarray(left * shares) * np.ones(int(free.sum()))
        over = wanted >= full
        if not over.any():
            ranks[free] = wanted
            break
        places = np.flatnonzero(free)[over]
        ranks[places] = full
        free[places] = False
        left -= full * places.size
    whole = np.floor(ranks + 1e-9).astype(int)
    spare = int(min(total, full * importance.size)) - int(whole.sum())
    for place in np.argsort(-importance, kind="stable"):
        if spare > 0 and whole[place] < full:
            whole[place] += 1
            spare -= 1
    return [int(rank) for rank in whole]


def rounded_rank(rank: int, groups: int, size: int, multiple: int) -> int:
    """The rank of each of ``groups`` groups of ``size`` channels: an equal part, to the nearest ``multiple``.

    At least one multiple and at most ``size``. Source: Palu (2407.21118), rank search "fisher_uniform".
    """
    share = rank / groups
    nearest = int(np.floor(share / multiple + 0.5)) * multiple
    return min(max(nearest, multiple), size)
