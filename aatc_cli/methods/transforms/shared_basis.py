"""Shared basis: one for the keys, or the values, of four neighbouring layers of a token (xKV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Sites

LAYERS = 4


class SharedLayers(Transform):
    """Source: xKV (2503.18893). The sites of single layers hold identity matrices."""

    name = "shared-basis"
    meaning = "one basis for four neighbouring layers"
    goes_with = together(quantizer=("latents",), allocator=("layer-ranks",))
    over_layers = True

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """Identity matrices: nothing is done to single layers."""
        from aatc_cli.core.transform import identity, rotation

        return rotation(identity(int(moments.shape[-1])).encode.to(moments).expand_as(moments))

    def joint(self, layers: Sequence[LayerStats], side: Side) -> tuple[dict[str, Tensor], Tensor]:
        """``basis_g`` [n C, q] of every group of n layers; no latents, which nobody makes tables of.

        Raises `ArtifactError` where too few rows were sampled.
        """
        import torch

        from aatc_cli.core.joint import principal_components
        from aatc_cli.core.layer_groups import layer_groups
        from aatc_cli.errors import ArtifactError

        found: dict[str, Tensor] = {}
        for place, group in enumerate(layer_groups(len(layers), LAYERS)):
            rows = torch.cat([self.rows(side, layers[layer]) for layer in group], 1)
            basis = principal_components(rows, int(rows.shape[1]))
            if basis.shape[1] == 0:
                raise ArtifactError("too few sampled rows for a basis of several layers", "collect with more --rows")
            found[f"basis_{place}"] = basis.to(torch.float32)
        return found, torch.zeros(0, 0, dtype=torch.float64)

    def joint_codec(self, recipe: RecipeFields, sites: Sites, side: Side) -> Any:
        """The codec of one side of all layers; raises `ArtifactError` where a plan codes more than a basis has."""
        import torch

        from aatc_cli.core.layer_groups import SharedBasis, layer_groups
        from aatc_cli.methods.quantizers.latent import mixing, row_codec

        groups = layer_groups(sites.geometry.layers, LAYERS)
        bases, inner = [], []
        for place, group in enumerate(groups):
            kept = sum(width > 0 for layer in group for width in sites.bits[layer][side])
            whole = len(group) * sites.geometry.channels
            basis = torch.from_numpy(sites.tensors.floats(f"joint.{side}.basis_{place}", (whole, -1)))
            if basis.shape[1] < kept:
                raise sites.tensors.damaged(f"its basis {place} of {side} has fewer latents than the plan keeps")
            turn = mixing(recipe.max_bits, kept)
            leading = basis[:, :kept]
            bases.append(leading.contiguous() if turn is None else leading @ turn.to(leading.dtype))
            inner.append(row_codec(recipe.max_bits, max(kept, 1), kept))
        return SharedBasis(tuple(groups), tuple(bases), tuple(inner))
