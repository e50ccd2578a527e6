"""Head eigen: principal directions of every head's values, and of the keys of all heads of a layer together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform


class HeadEigen(Transform):
    """Source: Eigen Attention (2408.05646); its public code for rotary models has one basis for a layer's keys."""

    name = "head-eigen"
    meaning = "eigenvectors of the second moment: of a head's values, of the keys of all heads of a layer"
    kinds = ("linear",)
    goes_with = together(key_groups=("per-head",), value_groups=("per-head",))

    def basis_moment(self, side: Side, stats: LayerStats, moment: Tensor) -> Tensor:
        """For keys the mean of the heads' own blocks, in the place of each."""
        import torch

        if side == "v":
            return moment
        heads = int(stats.q_outer.shape[0])
        rows = torch.unflatten(moment, 0, (heads, -1))
        blocks = torch.unflatten(rows, 2, (heads, -1)).diagonal(dim1=0, dim2=2)
        return torch.block_diag(*[blocks.mean(-1)] * heads)  # type: ignore[no-untyped-call,no-any-return]

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """From the moments of `basis_moment`."""
        from aatc_cli.core.transform import eigenbasis, rotation

        return rotation(eigenbasis(moments))
