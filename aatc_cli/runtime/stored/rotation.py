"""The rotation of keys by their positions, as a model makes it: taken off before they are coded, put on when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.rope import RopeStyle, apply_rope, unapply_rope

# cos and sin [n, R] of positions [n]
Tables = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """How keys turn with their positions: ``tables`` of the angles, and how pairs lie. ``scale``: what else it does."""

    tables: Tables
    style: RopeStyle
    scale: float = 1.0

    def taken_off(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotated keys [L, n, H, D] as they were before."""
        return self._turned(unapply_rope, keys, positions) / self.scale**2

    def put_on(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [L, n, H, D] from before, rotated."""
        return self._turned(apply_rope, keys, positions)

    def _turned(self, turn: Callable[..., Tensor], keys: Tensor, positions: Tensor) -> Tensor:
        if self.style == "none":
            return keys
        cos, sin = (table.to(keys)[None] for table in self.tables(positions.to(keys.device)))
        return turn(keys.transpose(1, 2), cos, sin, self.style).transpose(1, 2)

    def full_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [n, R] of all of a head's turned channels, every angle as often as channels have it."""
        cos, sin = self.tables(positions)
        if self.style == "half-once":
            return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return cos, sin


UNTURNED = Rotation(lambda positions: (torch.empty(0), torch.empty(0)), "none")


def keys_off(rows: Mapping[Side, Tensor], rotation: Rotation, positions: Tensor, heads: int) -> dict[Side, Tensor]:
    """Rows [L, n, C] of both sides with the rotation taken off the keys."""
    keys = rotation.taken_off(torch.unflatten(rows["k"], -1, (heads, -1)), positions)
    return {"k": keys.flatten(2), "v": rows["v"]}
