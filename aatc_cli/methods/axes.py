"""What every choice on an axis says, and what transforms and weights do. Those that decide on codes: `choices`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from aatc_cli.methods.sites import Site, Sites

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Floats, SiteEnergy
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.core.transform import GroupTransform
    from aatc_cli.methods.fields import RecipeFields


def together(**wanted: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """What a choice goes with: by field of the recipe the names or kinds that it may have."""
    return MappingProxyType(wanted)


class Choice:
    """One choice on an axis.

    name: as recipes write it. meaning: one line for tables. kinds: families that other choices may ask for by name.
    goes_with: as `together` has it. gradients: whether Stats need them.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = together()
    gradients: ClassVar[bool] = False

    def check(self, recipe: RecipeFields) -> None:
        """Raise `ValueError` for what ``goes_with`` cannot say of a recipe with this choice."""


class TableMaker:
    """A choice that reads tables of its own from the Transform, made of Stats by `whiten`.

    on: transforms into which its tables go unasked. asked: they go into a Transform of their own, made for it.
    fitted: making them is work enough for the device that `whiten` computes on; others are made on the CPU.
    """

    name: ClassVar[str]
    on: ClassVar[tuple[str, ...]] = ()
    asked: ClassVar[bool] = False
    fitted: ClassVar[bool] = False

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """Tensors of one site by name. latents: makes those of the sampled rows, [R, C] float64."""
        return {}

    def joint_tables(self, latents: Tensor) -> dict[str, Tensor]:
        """Tensors of one side over all layers by name, from latents [R, q]."""
        return {}


class Transform(Choice):
    """What turns a cached vector into latents and back.

    stored: whether its matrices are numbers that a cache must keep. over_layers: it takes all layers of a token as one.
    centred: packed quantizers code about a mean, which is kept with the matrices.
    mixes: a latent holds something of several channels.
    """

    stored: ClassVar[bool] = True
    mixes: ClassVar[bool] = True
    over_layers: ClassVar[bool] = False
    centred: ClassVar[bool] = False

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """Matrices of all head groups of a site, from second moments and loss metrics [G, E, E]."""
        raise NotImplementedError

    def moment(self, side: Side, stats: LayerStats) -> Tensor:
        """Second moment [C, C] in which variances of latents are measured."""
        return (stats.k_outer if side == "k" else stats.v_outer) / stats.count

    def basis_moment(self, side: Side, stats: LayerStats, moment: Tensor) -> Tensor:
        """Second moment [C, C] that the matrices are made from; ``moment`` is that of `moment`."""
        return moment

    def latents(self, side: Side, stats: LayerStats, encode: Tensor) -> Tensor:
        """Latents [R, C] float64 of the sampled rows under ``encode``."""
        import torch

        from aatc_cli.core.transform import encode as encoded

        return encoded(self.rows(side, stats).to(torch.float64), encode)

    def rows(self, side: Side, stats: LayerStats) -> Tensor:
        """The sampled rows of a site, [R, C]."""
        return (stats.k_rows if side == "k" else stats.v_rows)[: stats.filled]

    def tables(self, side: Side, stats: LayerStats) -> dict[str, Tensor]:
        """What it keeps of a site beside its matrices, by name."""
        return {}

    def joint(self, layers: Sequence[LayerStats], side: Side) -> tuple[dict[str, Tensor], Tensor]:
        """Tensors of one side over all layers by name, and latents [R, q] that tables are made of."""
        raise NotImplementedError

    def mean(self, site: Site) -> Tensor | None:
        """What is taken off vectors before they are transformed, [C], where a packed quantizer is told of it."""
        return None

    def around(self, site: Site, inner: Any) -> Any:
        """The codec of a site that codes its latents by ``inner``."""
        from aatc_cli.core.linear import LinearCodec

        return LinearCodec(*site.matrices(), inner)

    def joint_codec(self, recipe: RecipeFields, sites: Sites, side: Side) -> Any:
        """The codec of one side of all layers, of a transform over layers."""
        raise NotImplementedError

    def span(self, geometry: Geometry, groups: int) -> int:
        """Numbers of a decode row, which a coded latent costs."""
        return geometry.channels // groups


class Weight(Choice):
    """What noise in a latent costs. sides: where it may stand. in_nats: it is divergence, and so joins both sides.

    tensor: of a Transform's site, by which a searched token scale weighs errors; None: all alike.
    """

    sides: ClassVar[tuple[Side, ...]]
    in_nats: ClassVar[bool] = False
    tensor: ClassVar[str | None] = "weight"

    def energy(self, site: SiteEnergy, normal: Callable[[Floats], Floats], recipe: str) -> Floats:
        """w sigma^2 of every channel, [C]; ``normal`` divides by a percentile. Errors name the recipe."""
        return normal(site.variance)
