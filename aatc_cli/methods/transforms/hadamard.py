"""Hadamard: random signs and a Hadamard matrix, which spread outliers over all channels of a head group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.transform import GroupTransform


class Hadamard(Transform):
    """A random rotation of every head group."""

    name = "hadamard"
    meaning = "random signs, then a Hadamard matrix, per head group"
    kinds = ("linear", "uncalibrated")
    stored = False

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """The same rotation for every group."""
        from aatc_cli.core.hadamard import hadamard, random_signs
        from aatc_cli.core.transform import rotation

        size = int(moments.shape[-1])
        return rotation((random_signs(size)[:, None] * hadamard(size)).to(moments).expand_as(moments))
