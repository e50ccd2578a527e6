"""PCA: principal components of a layer's vectors about their mean (KVTC, layer by layer)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import Transform, together

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform
    from aatc_cli.methods.sites import Site


class Pca(Transform):
    """The mean taken off, then the eigenvectors of the covariance. Source: KVTC (2511.01815)."""

    name = "pca"
    meaning = "mean off, eigenvectors of the covariance"
    kinds = ("centred",)
    goes_with = together(quantizer=("block-max",))

    def moment(self, side: Side, stats: LayerStats) -> Tensor:
        """The covariance."""
        import torch

        mean = stats.mean(side)
        return super().moment(side, stats) - torch.outer(mean, mean)

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """From the covariances."""
        from aatc_cli.core.transform import eigenbasis, rotation

        return rotation(eigenbasis(moments))

    def latents(self, side: Side, stats: LayerStats, encode: Tensor) -> Tensor:
        """Of the sampled rows about the mean."""
        import torch

        from aatc_cli.core.transform import encode as encoded

        return encoded(self.rows(side, stats).to(torch.float64) - stats.mean(side), encode)

    def tables(self, side: Side, stats: LayerStats) -> dict[str, Tensor]:
        """The mean vector, [C]."""
        return {"mean": stats.mean(side)}

    def around(self, site: Site, inner: Any) -> Any:
        """The mean taken off and added again around the matrices."""
        from aatc_cli.core.linear import LinearCodec

        encode, decode = site.matrices()
        return LinearCodec(encode, decode, inner, site.read("mean", (site.geometry.channels,)))
