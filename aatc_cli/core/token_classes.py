"""Classes of tokens by the attention they received while they were exact: thresholds, counts and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import SIDES, Side
from aatc_cli.core.received_bins import EDGES
from aatc_cli.errors import AatcError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenClasses:
    """Classes of the tokens of every layer, by rising received attention r.

    thresholds [L, n - 1]: a token is in class k when k of them are not above its r. counts [L, n]: calibration tokens
    in each. costs: per side what noise in a token of the class costs, relative to the average token, [L, n].
    """

    thresholds: Floats
    counts: Ints
    costs: dict[Side, Floats]

    @property
    def count(self) -> int:
        """Classes of every layer."""
        return int(self.counts.shape[1])

    @property
    def shares(self) -> Floats:
        """Share of every class among the tokens of a layer. [L, n]."""
        found: Floats = self.counts / self.counts.sum(1, keepdims=True)
        return found


def token_classes(tables: Sequence[Floats], shares: Sequence[float]) -> TokenClasses:
    """Classes with about these ``shares`` of the tokens, from tables [3, BINS] of every layer.

    A table holds tokens, and what noise in their keys and values costs, by bin of r (`core.received`). Thresholds are
    edges of the grid, so that counts and costs of a class are sums of bins and nothing is interpolated.
    Raises `AatcError` where fewer bins than classes hold tokens.
    """
    parts = [_layer_classes(layer, table, shares) for layer, table in enumerate(tables)]
    return TokenClasses(
        np.array([thresholds for thresholds, _, _ in parts]),
        np.array([counts for _, counts, _ in parts]),
        {side: np.array([costs[side] for _, _, costs in parts]) for side in SIDES},
    )


def _layer_classes(
    layer: int, table: Floats, shares: Sequence[float]
) -> tuple[list[float], list[int], dict[Side, list[float]]]:
    tokens = table[0].astype(np.int64)
    below = np.cumsum(tokens)
    total, count = int(below[-1]), len(shares)
    # an edge behind an empty bin would part nothing
    edges = np.flatnonzero((tokens[:-1] > 0) & (below[:-1] < total))
    if edges.size < count - 1:
        raise AatcError(
            f"the attention that tokens of layer {layer} received tells fewer than {count} classes apart",
            "collect from more text with --fisher, or use a recipe with fewer token classes",
        )
    chosen: list[int] = []
    for index in range(1, count):
        # enough edges must be left for the thresholds above this one
        left = edges[: edges.size - (count - 1 - index)]
        left = left[left > chosen[-1]] if chosen else left
        wanted = total * math.fsum(shares[:index])
        chosen.append(int(left[np.argmin(np.abs(below[left] - wanted))]))
    spans = [slice(*pair) for pair in pairwise([0, *(edge + 1 for edge in chosen), tokens.size])]
    counts = [int(tokens[span].sum()) for span in spans]
    costs = {side: _relative_costs(table[row], spans, counts) for row, side in enumerate(SIDES, start=1)}
    return EDGES[chosen].tolist(), counts, costs


def _relative_costs(row: Floats, spans: Sequence[slice], counts: Sequence[int]) -> list[float]:
    # exactly rounded sums: the order of summation must not reach a plan
    sums = [max(math.fsum(row[span]), 0.0) for span in spans]
    mean = math.fsum(sums) / sum(counts)
    return [total / count / mean if mean > 0 else 1.0 for total, count in zip(sums, counts, strict=True)]
