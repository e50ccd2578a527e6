"""How the tokens of a tile are told apart: quotas of the classes, whose order it is, and which queries rank them.

A tile is t neighbouring tokens of a sequence that leave the window together. They are ranked by r, the sum of the
squared attention they received at distances that every one of them met while it was exact, and the lowest q_0 ranks are
class 0, the next q_1 class 1 and so on. So every tile of a plan holds the same number of tokens of every class: its
bytes are known before any text is seen, and without torch. The order is that of a layer, or each kv head has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.tile_sizes import RANKS, TILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Order = Literal["layer", "head"]
RankedBy = Literal["received", "chance"]


@dataclass(frozen=True)
class TileRule:
    """How the tokens of a tile are told apart: quotas of the classes, the lowest first, and whose order it is.

    ranked_by "chance": a fixed function of the place instead of attention, the control that tells whether r says
    anything.
    """

    quotas: tuple[int, ...]
    order: Order = "head"
    ranked_by: RankedBy = "received"

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return sum(self.quotas)

    @property
    def classes(self) -> int:
        """Classes in all."""
        return len(self.quotas)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the tokens in every class."""
        return tuple(quota / self.tile for quota in self.quotas)

    def lags(self, recent: int) -> tuple[int, int]:
        """First and last distance of the queries that count, in a window of ``recent`` tokens."""
        return tile_lags(recent, self.tile)

    def orders(self, heads: int) -> int:
        """Orders of a layer: one, or one for each of ``heads`` kv heads."""
        return heads if self.order == "head" else 1

    def received(self, weights: Tensor, watched: Tensor) -> Tensor:
        """What tokens receive from n queries: weights [B, H, G, n, S], watched [n, S] of 0 and 1. -> [B, orders, S].

        Query heads of one kv head lie together in G.
        """
        by_head = (weights * watched).square().sum((2, 3))
        return by_head if self.order == "head" else by_head.sum(1, keepdim=True)

    def classes_of(self, received: Tensor, first: int, layer: int) -> Tensor:
        """Classes of the tokens of whole tiles: ``received`` [..., tiles * t] of places from ``first`` on. -> int64.

        Ties go by place: of tokens that received the same, the earlier one is the lower.
        """
        from aatc_cli.core.tile_classes import chance, classes_of_ranked

        if self.ranked_by == "chance":
            received = chance(received, first, layer)
        return classes_of_ranked(received, self.quotas)

    def class_of_rank(self, device: torch.device | None = None) -> Tensor:
        """The class of every rank: int64 [t]."""
        from aatc_cli.core.tile_classes import class_of_rank

        return class_of_rank(self.quotas, device)

    def rank_shares(self) -> NDArray[np.float64]:
        """Share of every class in each of `RANKS` groups of ranks, [n, RANKS]; rows sum to one."""
        of_rank = np.repeat(np.arange(self.classes), self.quotas).reshape(RANKS, -1)
        members = np.stack([(of_rank == k).sum(-1) for k in range(self.classes)]).astype(np.float64)
        shares: NDArray[np.float64] = members / members.sum(1, keepdims=True)
        return shares


def tile_lags(recent: int, tile: int = TILE) -> tuple[int, int]:
    """First and last distance of the queries that count for a token, in a window of ``recent`` tokens.

    The last is the one that every token of a tile meets before the tile leaves. The first is half of that: what its
    neighbours pay a token says little of what later ones will.
    """
    last = max(recent - tile, 0)
    return last // 2, last


def class_bits(classes: int) -> int:
    """Bits that say the class of one token among ``classes``."""
    return math.ceil(math.log2(classes)) if classes > 1 else 0


def check_quotas(quotas: Sequence[int], rows: int, tile: int) -> str | None:
    """What is wrong with ``quotas`` of a tile of ``tile`` tokens in blocks of ``rows``, or None."""
    if not quotas or any(quota <= 0 or quota % rows for quota in quotas):
        return f"quotas must be multiples of {rows}"
    return None if sum(quotas) == tile else f"quotas must sum to {tile}, the tokens of a tile"
