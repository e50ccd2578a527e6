"""The engine's rotation of keys, taken off in float32: it multiplies by cos and sin rounded to the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.stored.rotation import Rotation


class Turning:
    """cos and sin of all positions up to ``limit``, float32 [limit, R], as rounded to ``dtype``."""

    def __init__(self, rotation: Rotation, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        cos, sin = rotation.full_tables(torch.arange(limit, device=device))
        self.cos, self.sin = cos.to(dtype).float(), sin.to(dtype).float()

    def tables(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [n, R] of positions from ``first`` on."""
        return self.cos[first : first + count], self.sin[first : first + count]

    def back(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What takes the rotation at ``positions`` [n] off: cos and sin [n, R] over the square of their length."""
        cos, sin = self.cos[positions], self.sin[positions]
        length = cos.square() + sin.square()
        return cos / length, -sin / length


def taken_off(keys: Tensor, back: tuple[Tensor, Tensor]) -> Tensor:
    """Rotated keys [n, H, D] as they were before, by `Turning.back`. -> [n, C] in their dtype."""
    turned = apply_rope(keys.float().transpose(0, 1)[None], back[0][None], back[1][None])
    return turned[0].transpose(0, 1).flatten(1).to(keys.dtype)
