"""Metric about the mean: the loss-aware KLT of what vectors have beside the mean that all of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.transforms.metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core import Side
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site


class CentredMetric(Metric):
    """The transform `metric` of covariances: no bit says what is the same in every token.

    Keys before RoPE have a mean that holds most of their energy in the loss metric; coded about zero it takes bits, is
    made smaller in every token alike, and is lost where its channel has no bits.
    """

    name = "metric-centred"
    meaning = "as metric, of what is left when the mean is taken off"
    kinds = ("about a mean",)
    centred = True

    def check(self, recipe: RecipeFields) -> None:
        """Means are added again where tiles are read."""
        if recipe.tokens is None:
            raise ValueError('transform "metric-centred" goes with tiles: give the recipe a table [tokens]')

    def moment(self, side: Side, stats: LayerStats) -> Tensor:
        """The covariance."""
        import torch

        mean = stats.mean(side)
        return super().moment(side, stats) - torch.outer(mean, mean)

    def rows(self, side: Side, stats: LayerStats) -> Tensor:
        """The sampled rows about the mean, [R, C] float64."""
        return super().rows(side, stats).double() - stats.mean(side)

    def mean(self, site: Site) -> Tensor | None:
        """As `whiten` wrote it, in float32."""
        return site.read("mean", (site.geometry.channels,)).float()

    def tables(self, side: Side, stats: LayerStats) -> dict[str, Tensor]:
        """The mean vector, [C]."""
        return {"mean": stats.mean(side)}
