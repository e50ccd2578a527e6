"""Query: the eigenbasis of the queries for keys, of the values for values, mixed by a Hadamard matrix (OSCAR)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform


class Query(Transform):
    """A rotation of every head. Source: OSCAR (2605.17757)."""

    name = "query"
    meaning = "eigenvectors of the queries' second moment (keys) or of the values' own, then a Hadamard matrix"
    kinds = ("linear",)
    goes_with = together(key_groups=("per-head",), value_groups=("per-head",))

    def basis_moment(self, side: Side, stats: LayerStats, moment: Tensor) -> Tensor:
        """For keys the metric of their error, which is the query's own second moment; one head to a group."""
        import torch

        if side == "v":
            return moment
        return torch.block_diag(*(stats.q_outer / stats.count))  # type: ignore[no-untyped-call,no-any-return]

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """From the moments of `basis_moment`."""
        from aatc_cli.core.hadamard import hadamard
        from aatc_cli.core.transform import eigenbasis, rotation

        return rotation(eigenbasis(moments) @ hadamard(int(moments.shape[-1])).to(moments))
