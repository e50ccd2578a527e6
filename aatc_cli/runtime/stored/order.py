"""Which tokens of a tile are worth more bits, where nobody saw what attention they received.

A plan with token classes ranks the tokens of a tile by the attention they received in the window. Pages of an engine do
not say that. What stands in for it is computed from the tokens themselves, one number for every order and token; more
of it is a higher class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import debias
from aatc_cli.runtime.stored.code import ChunkCode, Rows
from aatc_cli.runtime.tiles.layer import TileLayer

StandIn = Literal["energy", "key-norm", "value-norm", "place"]


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


Ranking = Callable[[TileLayer, Rows], Tensor]
STAND_INS: dict[StandIn, Ranking] = {"energy": energy, "key-norm": key_norm, "value-norm": value_norm, "place": place}


def ranked_by(code: ChunkCode, rows: Rows, received: Tensor | None, stand_in: Ranking) -> Tensor:
    """What the tokens of a chunk are ranked by: [L, orders, n], which may be written to.

    rows [L, n, C] of both sides. received [L, orders, n]: attention that they received, in place of the stand-in.
    Raises `AatcError` for attention of another shape.
    """
    (layers, tokens), device = rows["k"].shape[:2], rows["k"].device
    if not code.orders:
        return torch.zeros(layers, 1, tokens, device=device)
    if received is None:
        found = [stand_in(layer, {side: rows[side][layer.layer] for side in SIDES}) for layer in code.layers]
        return torch.stack(found).clone()
    if tuple(received.shape) != (layers, code.orders, tokens):
        raise AatcError(
            f"attention received is {list(received.shape)}, a chunk has {[layers, code.orders, tokens]}",
            "give it for every layer, order and token, or leave it out",
        )
    return received.to(device, torch.float32, copy=True)


def _by_order(x: Tensor, layer: TileLayer) -> Tensor:
    """Sums [orders, n] of numbers [n, C] over the channels of every order."""
    return torch.unflatten(x, -1, (layer.rule.orders(layer.heads), -1)).sum(-1).T
