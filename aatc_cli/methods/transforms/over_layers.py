"""Global: principal components over the keys, or the values, of all layers of a token (KVTC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry
    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Sites

# latents over all layers: as many as rows can tell apart, and no more than a basis of bearable size
LATENTS = 4096
# every fourth row is kept out of the joint basis and measures what its latents cost
_HELD_OUT = 4


class Global(Transform):
    """One basis over all layers; the sites of single layers hold identity matrices. Source: KVTC (2511.01815)."""

    name = "global"
    meaning = "principal components over all layers"
    kinds = ("centred",)
    goes_with = together(quantizer=("block-max",))
    over_layers = True

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """Identity matrices: nothing is done to single layers."""
        from aatc_cli.core.transform import identity, rotation

        return rotation(identity(int(moments.shape[-1])).encode.to(moments).expand_as(moments))

    def joint(self, layers: Sequence[LayerStats], side: Side) -> tuple[dict[str, Tensor], Tensor]:
        """Mean, basis and energy [q] of its latents, and the latents of the rows that are held out.

        The basis comes from three of four sampled rows, energy and errors from the fourth, as the original measures on
        tokens that it holds out. Raises `ArtifactError` where too few rows were sampled.
        """
        import torch

        from aatc_cli.core.joint import principal_components
        from aatc_cli.errors import ArtifactError

        mean = torch.cat([stats.mean(side) for stats in layers])
        rows = torch.cat([self.rows(side, stats) for stats in layers], 1).to(torch.float64) - mean
        held = torch.arange(rows.shape[0]) % _HELD_OUT == _HELD_OUT - 1
        basis = principal_components(rows[~held], LATENTS)
        if basis.shape[1] == 0:
            raise ArtifactError("too few sampled rows for a transform over all layers", "collect with more --rows")
        latents = rows[held] @ basis
        return {"mean": mean, "basis": basis.to(torch.float32), "energy": latents.square().mean(0)}, latents

    def joint_codec(self, recipe: RecipeFields, sites: Sites, side: Side) -> Any:
        """The codec of one side of all layers; raises `ArtifactError` where a plan codes more than the basis has."""
        import torch

        from aatc_cli.core.block_codec import BlockCodec
        from aatc_cli.core.joint import JointCodec
        from aatc_cli.core.precision_blocks import blocks_of

        assert sites.starts is not None
        whole = sites.geometry.layers * sites.geometry.channels
        widths = [width for layer in sites.bits for width in layer[side]]
        begins = [begin for layer in sites.starts for begin in layer[side]]
        blocks = blocks_of(widths, begins)
        coded = sum(block.size for block in blocks)
        basis = torch.from_numpy(sites.tensors.floats(f"joint.{side}.basis", (whole, -1)))
        if basis.shape[1] < coded:
            raise sites.tensors.damaged(f"its joint basis of {side} has fewer latents than the plan codes")
        mean = torch.from_numpy(sites.tensors.floats(f"joint.{side}.mean", (whole,)))
        return JointCodec(basis[:, :coded].contiguous(), mean, BlockCodec(blocks))

    def span(self, geometry: Geometry, groups: int) -> int:
        """The channels of all layers."""
        return geometry.channels * geometry.layers
