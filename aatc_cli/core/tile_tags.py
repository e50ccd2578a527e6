"""Classes of the tokens of a tile as bytes: one mask of a bit for every token for each bit of a class."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.tile_rule import class_bits


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
