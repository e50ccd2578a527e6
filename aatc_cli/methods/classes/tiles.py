"""Tiles: classes as quotas of the ranks inside a tile of 64 tokens, so that every tile takes the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Classes

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups, Settings
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats
    from aatc_cli.core.layout import CacheLayout
    from aatc_cli.core.tile_rule import TileRule
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import PlannedWidths, Tensors
    from aatc_cli.methods.tile_quotas import TileQuotas

_TILE = 64


class Tiles(Classes):
    """So many tokens of every tile in each class. Budgets in bits count all that a tile holds, not codes alone."""

    name = "tiles"
    meaning = "quotas of the ranks of received attention in a tile of 64 tokens"
    goes_with = together(quantizer=("tiled",), allocator=("waterfill",))
    tiled = True
    over_forecast = (1.5, 6.5)

    def told_by(self) -> type[Settings]:
        """The quotas."""
        from aatc_cli.methods.tile_quotas import TileQuotas

        return TileQuotas

    def check(self, recipe: RecipeFields) -> None:
        """What a tile holds, and who may rank its tokens."""
        if recipe.protect.layers or recipe.block != 1 or recipe.widths is not None or recipe.min_bits:
            raise ValueError("tiles need free widths from 0 on: no protected layers, blocks, widths or min_bits")
        if recipe.window.flush != _TILE or recipe.window.recent <= _TILE:
            raise ValueError(f"tiles need a window that flushes {_TILE} tokens at a time and holds more")
        alone = recipe.key_groups == recipe.value_groups == "per-head"
        if rule_of(recipe).order == "head" and not alone:
            raise ValueError("tokens that each kv head ranks itself need key_groups and value_groups per-head")

    def count(self, recipe: RecipeFields) -> int:
        """One for each quota."""
        return rule_of(recipe).classes

    def shared(self, recipe: RecipeFields) -> bool:
        """Where a layer ranks them."""
        return rule_of(recipe).order == "layer"

    def shares(self, recipe: RecipeFields) -> Sequence[float]:
        """The quotas of the tile's tokens."""
        return rule_of(recipe).shares

    def codec(self, recipe: RecipeFields, codec: Any, bits: Tensor) -> Any:
        """All classes side by side."""
        from aatc_cli.core.tile_codec import TileCodec

        return TileCodec(codec, bits, rule_of(recipe))

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> list[dict[Side, Floats]]:
        """Costs of every class and channel by layer and side, [n, C], relative to the average token.

        Raises `ArtifactError` for a Transform without costs by rank, `UsageError` where ranks are of another window.
        """
        from aatc_cli.core import SIDES
        from aatc_cli.core.tile_rule import tile_lags
        from aatc_cli.errors import ArtifactError, UsageError

        recipe, name = choices.recipe, "layers.0.tile_window"
        if not tensors.holds(name):
            raise ArtifactError(
                f"{tensors.path} does not say what tokens of each rank cost, by which {recipe.name} chooses widths",
                "collect windows of 512 tokens or more with --fisher N and whiten again, both with --force",
            )
        sinks, last = (int(number) for number in tensors.numbers(name, (2,)))
        if (sinks, last) != (recipe.window.sinks, tile_lags(recipe.window.recent)[1]):
            raise UsageError(
                f"recipe {recipe.name} has tiles behind {recipe.window.sinks} sinks and a window of "
                f"{recipe.window.recent}; the calibration ranked tokens behind {sinks}, watched for {last} steps",
                "give the recipe the sinks and the recent tokens that collect has",
            )
        rule = rule_of(recipe)
        place = 0 if rule.order == "layer" else 1
        shape = _quotas(recipe).costs_shape(geometry.channels)
        return [
            {side: _by_class(tensors.numbers(f"layers.{layer}.{side}.ranks", shape)[place], recipe) for side in SIDES}
            for layer in range(geometry.layers)
        ]

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Planes bought at one level over all classes, heads and layers; ``average`` counts everything in a tile."""
        from aatc_cli.core.tile_plan import TileBudget, plan_tiles

        recipe, values = choices.recipe, choices.grouped_energies(energies, groups)
        return plan_tiles(
            values,
            tables.classes,
            TileBudget(average, recipe.scale_bits, _quotas(recipe).lowest_bits, choices.quantizer.expected_bits()),
            choices.filling.curve[: recipe.max_bits + 1],
            rule_of(recipe),
            groups.k,
            joint=recipe.pool == "joint",
            alone=choices.prediction.reads_below(recipe),
        )

    def layout(self, choices: Choices, geometry: Geometry, groups: HeadGroups, plan: PlannedWidths) -> CacheLayout:
        """So many bytes a tile."""
        from aatc_cli.core.tile_layout import TileLayout

        recipe = choices.recipe
        expected = choices.quantizer.expected_bits()
        scale_bits = recipe.scale_bits if expected is None else 0
        law = TileLayout.of_classes(geometry, recipe.window, groups, plan.bits, rule_of(recipe), scale_bits, expected)
        return replace(law, centred=choices.transform.centred)

    def nominal(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: float) -> CacheLayout:
        """Tiles of so many bits a number."""
        from aatc_cli.core.layout import CacheLayout
        from aatc_cli.core.tile_layout import TileLayout

        recipe = choices.recipe
        base = CacheLayout.nominal(geometry, recipe.window, groups, bits, recipe.scale_bits)
        return replace(TileLayout.nominal_of(base, rule_of(recipe), bits), centred=choices.transform.centred)


def rule_of(recipe: RecipeFields) -> TileRule:
    """How a recipe tells the tokens of a tile apart."""
    from aatc_cli.core.tile_rule import TileRule

    told = _quotas(recipe)
    return TileRule(told.quotas, told.order, told.ranked_by)


def _quotas(recipe: RecipeFields) -> TileQuotas:
    """The table of a recipe that has tiles."""
    from aatc_cli.methods.tile_quotas import TileQuotas

    told = recipe.tokens
    assert isinstance(told, TileQuotas)
    return told


def _by_class(costs: Floats, recipe: RecipeFields) -> Floats:
    """Costs [n, C] of classes from those of ranks [RANKS, C], one after another: no machine adds in another order."""
    import numpy as np

    floor = _quotas(recipe).floor
    shares = rule_of(recipe).rank_shares()
    found = np.zeros((len(shares), costs.shape[1]))
    for rank, cost in enumerate(costs):
        found += shares[:, rank, None] * cost
    return (1.0 - floor) * found + floor
