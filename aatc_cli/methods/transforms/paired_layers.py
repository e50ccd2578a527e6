"""Paired layers: those of the upper half in pairs that share one direction for every head of a token (MiniCache)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform


class PairedLayers(Transform):
    """Source: MiniCache (2405.14366). It is not calibrated: sites and joint tables hold nothing of their own."""

    name = "paired-layers"
    meaning = "upper layers in pairs of one direction per head, with both lengths"
    kinds = ("uncalibrated",)
    goes_with = together(quantizer=("merged-minmax",), allocator=("paired",))
    stored = False
    over_layers = True

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """Identity matrices."""
        from aatc_cli.core.transform import identity, rotation

        return rotation(identity(int(moments.shape[-1])).encode.to(moments).expand_as(moments))

    def joint(self, layers: Sequence[LayerStats], side: Side) -> tuple[dict[str, Tensor], Tensor]:
        """Nothing."""
        import torch

        return {}, torch.zeros(0, 0, dtype=torch.float64)


def first_pair(layers: int) -> int:
    """The layer from which on layers are in pairs: the middle one."""
    return layers // 2


def shares_upper(layer: int, layers: int) -> bool:
    """Whether a layer is the upper one of a pair, whose codes are those of the lower one."""
    first = first_pair(layers)
    return layer > first and (layer - first) % 2 == 1
