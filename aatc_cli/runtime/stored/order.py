"""Which tokens of a tile are worth more bits, where nobody saw what attention they received.

A plan with token classes ranks the tokens of a tile by the attention they received in the window. Pages of an engine do
not say that. What stands in for it is computed from the tokens themselves, one number for every order and token; more
of it is a higher class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.models.adapter import debias
from aatc_cli.runtime.tiles.layer import TileLayer

StandIn = Literal["energy", "key-norm", "value-norm", "place"]
Rows = Mapping[Side, Tensor]


def energy(layer: TileLayer, rows: Rows) -> Tensor:
    """What a token holds by the plan's transform: latents squared and weighted, keys and values. -> [orders, n]."""
    total = torch.zeros((), device=layer.device)
    for side in SIDES:
        codec = layer.codecs[side].codec
        latents = codec.latents(debias(rows[side], layer.biases[side]))
        latents = (latents if codec.centre is None else latents - codec.centre).square()
        weight = codec.weight if codec.weight is not None else torch.ones_like(codec.variance)
        total = total + _by_order(latents * weight, layer)
    return total


def key_norm(layer: TileLayer, rows: Rows) -> Tensor:
    """Short keys first: in most heads tokens that receive attention have keys of small norm (2406.11430)."""
    return -_by_order(rows["k"].square(), layer)


def value_norm(layer: TileLayer, rows: Rows) -> Tensor:
    """Long values first."""
    return _by_order(rows["v"].square(), layer)


def place(layer: TileLayer, rows: Rows) -> Tensor:
    """Later tokens first: no more than their order, the control."""
    count = rows["k"].shape[0]
    return torch.arange(count, device=layer.device).expand(layer.rule.orders(layer.heads), count).to(torch.float32)


STAND_INS: dict[StandIn, Callable[[TileLayer, Rows], Tensor]] = {
    "energy": energy,
    "key-norm": key_norm,
    "value-norm": value_norm,
    "place": place,
}


def _by_order(x: Tensor, layer: TileLayer) -> Tensor:
    """Sums [orders, n] of numbers [n, C] over the channels of every order."""
    return torch.unflatten(x, -1, (layer.rule.orders(layer.heads), -1)).sum(-1).T
