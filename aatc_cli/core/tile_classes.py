"""Classes of the tokens of a tile: quotas of the ranks that the attention they received gives them.

A tile is t neighbouring tokens of a sequence that leave the window together. They are ranked by r, the sum of the
squared attention they received at distances that every one of them met while it was exact, and the lowest q_0 ranks are
class 0, the next q_1 class 1 and so on. So every tile of a plan holds the same number of tokens of every class: its
bytes are known before any text is seen. The order is that of a layer, or each kv head has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.core.tile_sizes import RANKS, TILE

Order = Literal["layer", "head"]
RankedBy = Literal["received", "chance"]

_HOST = torch.device("cpu")
# odd constants that spread the bits of a place over a word
_MIX = (0x9E3779B1, 0x85EBCA6B)


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
        if self.ranked_by == "chance":
            received = chance(received, first, layer)
        order = _order(torch.unflatten(received, -1, (-1, self.tile)))
        classes = self.class_of_rank(received.device).expand_as(order)
        return torch.empty_like(order).scatter_(-1, order, classes).flatten(-2)

    def class_of_rank(self, device: torch.device = _HOST) -> Tensor:
        """The class of every rank: int64 [t]."""
        return _class_of_rank(self.quotas, device)

    def rank_shares(self) -> Tensor:
        """Share of every class in each of `RANKS` groups of ranks, float64 [n, RANKS]; rows sum to one."""
        groups = self.class_of_rank().view(RANKS, -1)
        members = torch.stack([(groups == k).sum(-1) for k in range(self.classes)]).to(torch.float64)
        return members / members.sum(1, keepdim=True)


def tile_lags(recent: int, tile: int = TILE) -> tuple[int, int]:
    """First and last distance of the queries that count for a token, in a window of ``recent`` tokens.

    The last is the one that every token of a tile meets before the tile leaves. The first is half of that: what its
    neighbours pay a token says little of what later ones will.
    """
    last = max(recent - tile, 0)
    return last // 2, last


def _order(received: Tensor) -> Tensor:
    """Places of the tokens of a tile [..., t] by rising r, ties by place."""
    return received.argsort(dim=-1, stable=True)


# asked for at every tile: what comes from the host makes a GPU wait
@lru_cache(maxsize=32)
def _class_of_rank(quotas: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(quotas)), torch.tensor(quotas)).to(device)


def tile_ranks(received: Tensor) -> Tensor:
    """Rank of every token among its tile [..., t], 0 for the one that received least; ties by place. -> int64."""
    order = _order(received)
    places = torch.arange(received.shape[-1], device=received.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def chance(like: Tensor, first: int, layer: int) -> Tensor:
    """Numbers that have nothing to do with attention, a function of place, order and layer alone; shape of ``like``."""
    places = torch.arange(first, first + like.shape[-1], device=like.device)
    orders = torch.arange(like.shape[-2], device=like.device)[:, None]
    words = (places + 1) * _MIX[0] + (orders * 1009 + layer + 1) * _MIX[1]
    for shift in (15, 13):
        words = ((words ^ (words >> shift)) * _MIX[1]) & 0xFFFFFFFF
    return (words ^ (words >> 16)).to(torch.float64).expand(like.shape)


def class_bits(classes: int) -> int:
    """Bits that say the class of one token among ``classes``."""
    return math.ceil(math.log2(classes)) if classes > 1 else 0


def pack_classes(classes: Tensor, count: int) -> Tensor:
    """Classes [..., t] below ``count`` as bytes [..., t * bits / 8]: one mask of t bits for every bit of a class."""
    places = 1 << torch.arange(8, device=classes.device)
    masks = [(torch.unflatten((classes >> bit) & 1, -1, (-1, 8)) * places).sum(-1) for bit in range(class_bits(count))]
    if not masks:
        return torch.zeros(*classes.shape[:-1], 0, dtype=torch.uint8, device=classes.device)
    return torch.cat(masks, -1).to(torch.uint8)


def unpack_classes(data: Tensor, count: int) -> Tensor:
    """Inverse of `pack_classes`, for at least two classes. -> int64 [..., t]."""
    places = torch.arange(8, device=data.device)
    bits = (data[..., None].to(torch.int64) >> places) & 1
    masks = torch.unflatten(bits.flatten(-2), -1, (class_bits(count), -1))
    weights = 1 << torch.arange(masks.shape[-2], device=data.device)
    return (masks * weights[:, None]).sum(-2)


def rows_of(classes: Tensor) -> Tensor:
    """The place in its tile of every row of the tile [..., t]: rows lie by class, those of a class by place."""
    return classes.argsort(dim=-1, stable=True)


def check_quotas(quotas: Sequence[int], rows: int, tile: int) -> str | None:
    """What is wrong with ``quotas`` of a tile of ``tile`` tokens in blocks of ``rows``, or None."""
    if not quotas or any(quota <= 0 or quota % rows for quota in quotas):
        return f"quotas must be multiples of {rows}"
    return None if sum(quotas) == tile else f"quotas must sum to {tile}, the tokens of a tile"
