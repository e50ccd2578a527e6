"""Classes of the tokens that a press leaves: of every kv head they fill tiles of their own, ranked as in any tile."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.tile_rule import TileRule


def classes_of_kept(rule: TileRule, received: Tensor, kept: Tensor | None, first: int, layer: int) -> Tensor:
    """Classes of tokens from place ``first`` on that received [B, orders, P], of which those ``kept`` fill tiles.

    kept [B, H, P], or None for all of them. Of a tile that is not full those that are missing are the lowest. Tokens
    that are not kept are of any class.
    """
    if kept is None:
        return rule.classes_of(received, first, layer)
    order = torch.argsort((~kept).to(torch.int8), dim=-1, stable=True)
    ranked = torch.where(kept, received, torch.full_like(received, -1)).gather(-1, order)
    size = int(kept.shape[-1])
    padded = torch.nn.functional.pad(ranked, (0, -size % rule.tile), value=-1.0)
    classes = rule.classes_of(padded, first, layer)[..., :size]
    return torch.empty_like(classes).scatter_(-1, order, classes)
