"""Whiten: the paper's whitening-based decorrelation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.transform import GroupTransform


class Whiten(Transform):
    """The factorization A B of the paper (Eq. AB-factorization)."""

    name = "whiten"
    meaning = "the paper's: uncorrelated latents, the loudest first"
    kinds = ("linear",)

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """From the second moments alone."""
        from aatc_cli.core.transform import whitening

        return whitening(moments)
