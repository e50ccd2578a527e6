"""Classes of the tokens of a tile as tensors: by quotas of their ranks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_HOST = torch.device("cpu")
# odd constants that spread the bits of a place over a word
_MIX = (0x9E3779B1, 0x85EBCA6B)


def _order(received: Tensor) -> Tensor:
    """Places of the tokens of a tile [..., t] by rising r, ties by place."""
    return received.argsort(dim=-1, stable=True)


def classes_of_ranked(received: Tensor, quotas: tuple[int, ...]) -> Tensor:
    """Classes of the tokens of whole tiles by ``received`` [..., tiles * t], the lowest first. -> int64, its shape."""
    order = _order(torch.unflatten(received, -1, (-1, sum(quotas))))
    classes = class_of_rank(quotas, received.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, classes).flatten(-2)


# asked for at every tile: what comes from the host makes a GPU wait
@lru_cache(maxsize=32)
def class_of_rank(quotas: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """The class of every rank of a tile with these quotas: int64 [t], on the CPU unless said otherwise."""
    return torch.repeat_interleave(torch.arange(len(quotas)), torch.tensor(quotas)).to(device or _HOST)


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


def rows_of(classes: Tensor) -> Tensor:
    """The place in its tile of every row of the tile [..., t]: rows lie by class, those of a class by place."""
    return classes.argsort(dim=-1, stable=True)
