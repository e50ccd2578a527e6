"""Priced: one allocation over tokens and channels of a prompt, in which eviction is a class of width 0.

A token takes the class of tiles, or none, that costs least in loss and bytes at one price (`core.press.priced`).
Ours; the second reading that tells what matters is KVzip's (2505.23416), by the sum of squared weights that noise is
weighed with in the loss (docs/log/tiles.md), and not by the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.layout import CacheLayout
    from aatc_cli.core.press.reading import Reading
    from aatc_cli.core.press.state import Pressed
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import PlannedWidths


class Priced(Press):
    """Over all heads of all layers. ``keep`` of a recipe says how wide its classes are and not how many tokens stay."""

    name = "priced"
    meaning = "tokens take the class of tiles, or none, that costs least in loss and bytes"
    rereads = True
    says_classes = True
    spread = "model"
    # of a token's importance, what the prompt's own tokens say
    own: ClassVar[float] = 0.5

    def check(self, recipe: RecipeFields) -> None:
        """What tokens are shared out over, in nats."""
        if recipe.tokens is None or not recipe.key_weight == recipe.value_weight == "fisher":
            raise ValueError(
                f'press "{self.name}" shares tokens out over the classes of tiles, whose losses are in nats'
            )
        if recipe.keep is not None and recipe.keep > 1:
            raise ValueError(
                f'press "{self.name}" is told by keep how wide classes are: a share, and no number of tokens'
            )

    def over_readings(self, readings: Sequence[Reading], among: Tensor, packed: int, pressed: Pressed) -> list[Tensor]:
        """Classes at the price that the plan's bytes come to."""
        from aatc_cli.core.press.priced import priced_classes

        assert pressed.levels is not None
        return priced_classes(readings, among, pressed.levels, self.own)

    def layout(self, law: CacheLayout, plan: PlannedWidths) -> CacheLayout:
        """Streams of rows, a class each."""
        from aatc_cli.core.press.free_layout import FreeTileLayout
        from aatc_cli.core.tile_layout import TileLayout

        assert isinstance(law, TileLayout)
        if not plan.bits:
            return super().layout(law, plan)
        return FreeTileLayout.of(law, plan.bits, plan.keep)

    def levels(self, layout: CacheLayout, losses: Any) -> Any:
        """Bytes and losses of every class, from the plan's byte law and losses [L, H, n + 1]."""
        import torch

        from aatc_cli.core.press.free_layout import FreeTileLayout
        from aatc_cli.core.press.priced import Levels

        assert isinstance(layout, FreeTileLayout)
        paid = [[[row.total for row in rows] for rows in layer] for layer in layout.rows]
        return Levels(torch.tensor(paid, dtype=torch.float64), torch.from_numpy(losses), layout.room)
