"""Choices: a recipe as the objects of its axes, and what allocators, quantizers and classes of tokens do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from aatc_cli.methods.axes import Choice, TableMaker, Transform, Weight
from aatc_cli.methods.prediction import Prediction
from aatc_cli.methods.sites import Library, PlannedWidths, Site, Sites, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups, Settings
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, SiteEnergy
    from aatc_cli.core.filling import Filling
    from aatc_cli.core.layout import CacheLayout, Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.press import Press


class Allocator(Choice, TableMaker):
    """How a budget becomes widths.

    nothing: it allocates nothing. one_width: budgets are widths. fractional: any mean width may come of it. pools: it
    may put keys and values in one pool. truncates: latents without a width are not even kept.
    """

    nothing: ClassVar[bool] = False
    one_width: ClassVar[bool] = False
    fractional: ClassVar[bool] = True
    pools: ClassVar[bool] = False
    truncates: ClassVar[bool] = False

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> Any:
        """Its tables from a Transform, or None; raises `ArtifactError` when they are not what they must be."""
        return None

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Widths of every site at ``average`` bits per channel; raises `AatcError` when the budget cannot be met."""
        raise NotImplementedError

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """Widths [C] of a site at ``bits`` per channel, where nothing is known of a model."""
        return [int(bits > 0)] * channels

    def rows(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths) -> tuple[int, int]:
        """Rows of kept latents of a token over all sites, and numbers of all matrices that decode them."""
        raise NotImplementedError

    def codec(self, choices: Choices, site: Site) -> Any:
        """The codec of a site at its widths."""
        return choices.quantizer.site_codec(choices, site)


class Quantizer(Choice, TableMaker):
    """How latents become codes.

    packed: the packed cache holds its codes; others are simulated. blocks: a plan says where blocks of one precision
    begin. curve: name of its distortion at b bits, as `distortion` has it; None: it has no curve of its own.
    """

    packed: ClassVar[bool] = False
    blocks: ClassVar[bool] = False
    curve: ClassVar[str | None] = None

    def along_tokens(self, recipe: RecipeFields) -> bool:
        """Whether it codes neighbouring tokens together, so that one cannot be left out."""
        return "channel" in (recipe.coding.key_axis, recipe.coding.value_axis)

    def distortion(self) -> Sequence[float]:
        """Mean squared error on a channel of energy 1 at 0 .. 16 bits."""
        raise NotImplementedError

    def expected_bits(self) -> Sequence[float] | None:
        """Bits that a code of each width is expected to take, where codes have no fixed size; None: the width."""
        return None

    def read_back(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
        """By width: `distortion`, bits, and of a latent the share and the noise that are read back.

        The noise is apart from the latent; both are of a channel of energy 1.
        """
        raise NotImplementedError

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads | None:
        """Bytes beside its codes at these widths; None: token scales and matrices, as the layout counts them.

        blocks: of one precision, over all sites.
        """
        return None

    def codec(self, choices: Choices, site: Site) -> Any:
        """The codec of latents of a site."""
        raise NotImplementedError

    def site_codec(self, choices: Choices, site: Site) -> Any:
        """The codec of a site: that of its latents with the transform around it."""
        return choices.transform.around(site, self.codec(choices, site))

    def joint_codec(self, choices: Choices, sites: Sites, side: Side) -> Any:
        """The codec of one side of all layers, where the transform is over layers: the transform's own."""
        return choices.transform.joint_codec(choices.recipe, sites, side)

    def ready(self, library: Library, bits: int, flush: int) -> None:
        """Raise `AatcError` where a package that it needs is missing, before anything is computed."""


class Classes(Choice):
    """How tokens are told apart.

    tiled: classes are quotas inside a tile, whose codecs hold the rule; the packed cache keeps them.
    over_forecast: between how many times the forecast of KL the KL measured on other text lay (docs/log/tiles.md).
    """

    tiled: ClassVar[bool] = False
    over_forecast: ClassVar[tuple[float, float]] = (2.0, 10.0)

    def told_by(self) -> type[Settings] | None:
        """The model of its table ``[tokens]`` in a recipe, or None."""
        return None

    def count(self, recipe: RecipeFields) -> int:
        """Classes of tokens."""
        return 1

    def shares(self, recipe: RecipeFields) -> Sequence[float]:
        """Share of the tokens in every class."""
        return (1.0,)

    def shared(self, recipe: RecipeFields) -> bool:
        """Whether all heads of a layer tell tokens apart alike."""
        return False

    def codec(self, recipe: RecipeFields, codec: Any, bits: Tensor) -> Any:
        """The codec of one site with widths ``bits`` [n, C] of n classes, from that of the first class."""
        return codec

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> Any:
        """What a Transform says that tokens of each class cost, or None; raises `AatcError`."""
        return None

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Widths of every site and class at ``average`` bits per channel."""
        raise NotImplementedError

    def layout(self, choices: Choices, geometry: Geometry, groups: HeadGroups, plan: PlannedWidths) -> CacheLayout:
        """The byte law at planned widths."""
        raise NotImplementedError

    def nominal(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: float) -> CacheLayout:
        """The byte law at an average width, before any plan exists."""
        raise NotImplementedError


@dataclass(frozen=True)
class MethodTables:
    """What a method reads of a Transform beside energies: tables of its allocator, and classes of tokens."""

    allocator: Any = None
    classes: Any = None


@dataclass(frozen=True)
class Choices:
    """A recipe with the object of every axis. curve: the quantizer whose distortion the allocator counts on."""

    recipe: RecipeFields
    transform: Transform
    key_weight: Weight
    value_weight: Weight
    allocator: Allocator
    quantizer: Quantizer
    classes: Classes
    curve: Quantizer
    prediction: Prediction
    press: Press

    @property
    def by_axis(self) -> tuple[tuple[str, Choice], ...]:
        """The objects by the field that names them, in the order in which what does not fit is said."""
        return (
            ("quantizer", self.quantizer),
            ("allocator", self.allocator),
            ("transform", self.transform),
            ("key_weight", self.key_weight),
            ("value_weight", self.value_weight),
            ("tokens", self.classes),
            ("prediction", self.prediction),
            ("press", self.press),
        )

    def weight(self, side: Side) -> Weight:
        """The weight of one side."""
        return self.key_weight if side == "k" else self.value_weight

    @property
    def tables(self) -> tuple[str, ...]:
        """Whose tables its Transform must hold beyond those it holds unasked, by name."""
        return (self.quantizer.name,) if self.quantizer.asked else ()

    def energy(self, site: SiteEnergy, side: Side) -> Floats:
        """w sigma^2 of every channel of a site under the recipe's weights and normalisation. -> [C].

        With Fisher weights it is half of that, which is in nats per position: the divergence that losing the channel
        costs. Variances, and query weights of keys, are divided by the layer's own percentile ("Experimental Setting
        ... AATC").
        """
        from aatc_cli.core.allocate import over_percentile

        percentile = self.recipe.normalize_percentile
        return self.weight(side).energy(site, lambda values: over_percentile(values, percentile), self.recipe.name)

    def grouped_energies(self, energies: Energies, groups: HeadGroups) -> dict[Side, list[Floats]]:
        """Energies of every layer by side and head group, [groups, E] each."""
        from aatc_cli.core import SIDES

        return {
            side: [self.energy(layer[side], side).reshape(groups.of(side), -1) for layer in energies] for side in SIDES
        }

    @property
    def filling(self) -> Filling:
        """The rule by which channels are given widths."""
        import numpy as np

        from aatc_cli.core.filling import Filling

        return Filling(np.array(self.curve.distortion()), self.recipe.allowed_widths, self.recipe.block)

    def channel_curves(self, energy: Floats) -> Floats:
        """Distortion of every channel at every width under the quantizer's model. [n] -> [n, max_bits + 1]."""
        return self.filling.curves(energy)

    def require_blocks(self, channels: int, groups: HeadGroups) -> None:
        """Raise `AatcError` unless the recipe's blocks fill the head groups of sites of ``channels`` C."""
        from aatc_cli.errors import AatcError

        for size in {channels // groups.k, channels // groups.v}:
            if size % self.recipe.block:
                raise AatcError(
                    f"recipe {self.recipe.name} gives one width to {self.recipe.block} channels at a time, "
                    f"which do not divide the {size} of a head group",
                    "set block in the recipe to a divisor of that number, or choose other head groups",
                )

    def read_tables(self, tensors: Tensors, geometry: Geometry) -> MethodTables:
        """What it needs of a Transform; raises `AatcError`."""
        return MethodTables(self.allocator.read(self, tensors, geometry), self.classes.read(self, tensors, geometry))

    def allocate(
        self, energies: Energies, average: float, groups: HeadGroups | None = None, tables: MethodTables | None = None
    ) -> Allocation:
        """Widths for every site at an average of ``average`` bits per channel.

        ``groups`` are the Transform's head groups, inside which blocks are formed (None: one of each). Raises
        `AatcError` when the budget cannot be met, or the transform lacks what the method weighs by.
        """
        from aatc_cli.config import HeadGroups

        found = groups or HeadGroups.both(1)
        self.require_blocks(energies[0]["k"].variance.size, found)
        return self.classes.allocate(self, energies, average, found, tables or MethodTables())

    def layout(
        self, geometry: Geometry, groups: HeadGroups, bits: Sequence[Widths], blocks: int = 0, keep: float = 1.0
    ) -> CacheLayout:
        """The byte law of widths bits[class][layer][side] [C]; blocks: of one precision; keep: share of the tokens."""
        planned = PlannedWidths(bits, blocks, keep)
        found = self.press.layout(self.classes.layout(self, geometry, groups, planned), planned)
        return found.with_maps(self.prediction.map_bytes(self.recipe, geometry, groups))

    def nominal_layout(self, geometry: Geometry, groups: HeadGroups, bits: float) -> CacheLayout:
        """The byte law at an average width, before any plan exists; of a press at the share that its recipe says."""
        law = self.classes.nominal(self, geometry, groups, bits)
        return self.press.layout(law, PlannedWidths((), 0, self.recipe.keep or 1.0))

    def codecs(self, sites: Sites, device: str) -> list[dict[Side, Any]]:
        """One codec per layer and side on ``device``; of a transform over all layers the same one for every layer.

        Raises `ArtifactError` on values that no codec can have, `AatcError` for a package that is missing.
        """
        from aatc_cli.core import SIDES

        layers = range(sites.geometry.layers)
        if self.transform.over_layers:
            joint = {side: self.quantizer.joint_codec(self, sites, side).to(device) for side in SIDES}
            return [dict(joint) for _ in layers]
        return [
            {side: self.allocator.codec(self, sites.of(layer, side)).to(device) for side in SIDES} for layer in layers
        ]
