"""Received: classes by thresholds of the attention that a token received while it was exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Classes

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups, Settings
    from aatc_cli.core.allocate import Allocation, Energies
    from aatc_cli.core.layout import CacheLayout
    from aatc_cli.core.token_classes import TokenClasses
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import PlannedWidths, Tensors


class Received(Classes):
    """Shares of the calibration text in every class; each has widths of its own."""

    name = "received"
    meaning = "shares of the tokens, by thresholds of received attention"
    goes_with = together(quantizer=("packed",), allocator=("waterfill",))
    measured = True

    def told_by(self) -> type[Settings]:
        """The shares."""
        from aatc_cli.methods.token_rates import TokenRates

        return TokenRates

    def check(self, recipe: RecipeFields) -> None:
        """What the classes share out is one pool of channels."""
        if recipe.protect.layers:
            raise ValueError("tokens need no protected layers")

    def count(self, recipe: RecipeFields) -> int:
        """One for each share."""
        return len(shares_of(recipe))

    def shares(self, recipe: RecipeFields) -> tuple[float, ...]:
        """Those asked for; found ones differ."""
        return shares_of(recipe)

    def codec(self, recipe: RecipeFields, codec: Any, bits: Tensor, thresholds: Tensor) -> Any:
        """One codec for each class, chosen by thresholds."""
        from aatc_cli.core.rated import RatedCodec

        return RatedCodec(tuple(codec.with_bits(widths) for widths in bits), thresholds)

    def read(
        self, choices: Choices, tensors: Tensors, geometry: Geometry, lags: tuple[int, int] | None
    ) -> TokenClasses:
        """From what the calibration watched; raises `ArtifactError` or `UsageError` where that tells no classes."""
        import numpy as np

        from aatc_cli.core.received_bins import BINS, watched_lags
        from aatc_cli.core.token_classes import token_classes
        from aatc_cli.errors import ArtifactError, UsageError

        recipe = choices.recipe
        if lags is None:
            raise ArtifactError(
                f"{tensors.path} does not say what attention tokens received, by which {recipe.name} chooses their "
                "rates",
                "collect with --fisher N and whiten again, both with --force",
            )
        first, last = watched_lags(recipe.window)
        if tuple(lags) != (first, last):
            raise UsageError(
                f"recipe {recipe.name} watches tokens for {first} to {last} steps, "
                f"the calibration watched them for {lags[0]} to {lags[1]}",
                "give the recipe the window that collect has: 128 recent tokens, flushed 16 at a time",
            )
        tables = []
        for layer in range(geometry.layers):
            table = tensors.floats(f"layers.{layer}.received", (3, BINS))
            if table.dtype != np.float64 or bool((table[0] < 0).any()) or not bool(table[0].any()):
                raise tensors.damaged(f"layer {layer} counts no tokens by what they received")
            tables.append(table)
        return token_classes(tables, shares_of(choices.recipe))

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """One level over the channels of all classes."""
        from aatc_cli.core.token_rates import allocate_classes

        values, joint = choices.grouped_energies(energies, groups), choices.recipe.pool == "joint"
        return allocate_classes(values, average, choices.filling, tables.classes, joint=joint)

    def layout(self, choices: Choices, geometry: Geometry, groups: HeadGroups, plan: PlannedWidths) -> CacheLayout:
        """A stream for every class."""
        from aatc_cli.core.token_layout import TokenLayout

        recipe = choices.recipe
        return TokenLayout.of_classes(geometry, recipe.window, groups, plan.bits, plan.shares, recipe.scale_bits)

    def nominal(self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: float) -> CacheLayout:
        """Streams of the average width, in the recipe's shares."""
        from aatc_cli.core.layout import CacheLayout
        from aatc_cli.core.token_layout import TokenLayout

        recipe = choices.recipe
        base = CacheLayout.nominal(geometry, recipe.window, groups, bits, recipe.scale_bits)
        shares = shares_of(recipe)
        return TokenLayout.of_streams(base, (base.widths,) * len(shares), (shares,) * geometry.layers)


def shares_of(recipe: RecipeFields) -> tuple[float, ...]:
    """Shares of the tokens in every class, least attended first."""
    from aatc_cli.methods.token_rates import TokenRates

    assert isinstance(recipe.tokens, TokenRates)
    return recipe.tokens.shares
