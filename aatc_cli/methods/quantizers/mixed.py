"""Mixed min-max: groups between minimum and maximum, some key channels wider and some as they are (MixKVQ)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.quantizers.grouped_minmax import Grouped

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site

# members of a group whose range is a step's, and the width at which a channel's step is taken
GROUP, NARROW = 32, 2


class Mixed(Grouped):
    """Source: MixKVQ (2512.19206). Its table is the salience of every key channel."""

    name = "mixed-minmax"
    meaning = "grouped-minmax, key channels of 16 bits as they are"
    goes_with = together(allocator=("salience",), transform=("identity",), coordinates=("pre-rope",))
    asked = True

    def check(self, recipe: RecipeFields) -> None:
        """Groups of keys lie along channels, those of values in a token."""
        if recipe.coding.key_axis != "channel" or recipe.coding.value_axis != "token":
            raise ValueError('quantizer "mixed-minmax" goes with coding.key_axis "channel" and value_axis "token"')

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """For keys ``salience`` [C]: the queries' root mean square in a channel times its step."""
        from aatc_cli.core.mixed import channel_salience

        if side == "v":
            return {}
        return {"salience": channel_salience(latents(), stats.q_outer / stats.count, GROUP, NARROW)}

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """As grouped-minmax; what is kept as it is has no scale, but the widths of key channels are written down."""
        from aatc_cli.core.mixed import WHOLE

        narrow: Widths = [
            {side: [0 if width == WHOLE else width for width in widths] for side, widths in layer.items()}
            for layer in bits
        ]
        found = super().overheads(choices, geometry, groups, narrow, blocks)
        return replace(found, static={**found.static, "widths": geometry.layers * geometry.channels})

    def codec(self, choices: Choices, site: Site) -> Any:
        """Raises as that of grouped-minmax."""
        from aatc_cli.core.mixed import MixedMinMax

        return MixedMinMax(super().codec(choices, site))
