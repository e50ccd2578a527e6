"""Per head: one width for every kv head, from error curves fitted to the quantizer as it is (RateQuant)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints, SiteEnergy
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Tensors


class PerHead(Allocator):
    """Source: RateQuant (2605.06675). Its table is the error of every head at every width."""

    name = "per-head"
    meaning = "a width per kv head, from fitted curves"
    goes_with = together(transform=("hadamard",), key_groups=("per-head",), value_groups=("per-head",))
    on = ("hadamard",)

    def check(self, recipe: RecipeFields) -> None:
        """A curve is fitted through two widths at least."""
        if not 1 <= recipe.min_bits < recipe.max_bits <= 8:
            raise ValueError(
                'allocator "per-head" fits curves to widths from min_bits to max_bits, two of 1 .. 8 at least'
            )

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """``head_error`` [H, 9], where every head is transformed alone."""
        from aatc_cli.core.grouped import head_errors
        from aatc_cli.core.head_rates import WIDEST

        return {"head_error": head_errors(latents(), groups, WIDEST)} if groups == stats.q_outer.shape[0] else {}

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> list[dict[Side, Floats]]:
        """Errors [H, 9] per layer and side."""
        from aatc_cli.core.head_rates import WIDEST
        from aatc_cli.methods.allocators.site_arrays import site_arrays

        return site_arrays(tensors, geometry.layers, "head_error", (geometry.kv_heads, WIDEST + 1))

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Water-filled over heads, keys and values apart."""
        import numpy as np

        from aatc_cli.core import SIDES
        from aatc_cli.core.allocate import Allocation, waterfill
        from aatc_cli.core.head_rates import WIDEST

        errors: Sequence[dict[Side, Floats]] = tables
        widths = tuple(width for width in choices.recipe.allowed_widths if width <= WIDEST)
        bits: list[dict[Side, Ints]] = [{} for _ in energies]
        predicted: dict[Side, float] = {}
        for side in SIDES:
            curves = np.concatenate(
                [
                    head_curves(choices, layer[side], table[side], side)
                    for layer, table in zip(energies, errors, strict=True)
                ]
            )
            heads = curves.shape[0] // len(energies)
            chosen = waterfill(curves, math.floor(average * curves.shape[0] + 1e-9), widths=widths)
            size = energies[0][side].variance.size // heads
            for layer, row in enumerate(chosen.reshape(len(energies), heads)):
                bits[layer][side] = np.repeat(row, size)
            predicted[side] = size * math.fsum(curves[np.arange(curves.shape[0]), chosen])
        return Allocation(bits, predicted, {"k": 0.0, "v": 0.0})


def head_curves(choices: Choices, site: SiteEnergy, errors: Floats, side: Side) -> Floats:
    """The fitted curve of every head of a site, per channel, times what its noise costs by the recipe's weight."""
    import numpy as np

    from aatc_cli.core.head_rates import fitted_curves

    energy = choices.energy(site, side)
    alive = site.variance > 0
    weight = np.where(alive, energy / np.where(alive, site.variance, 1.0), 0.0).reshape(errors.shape[0], -1).mean(1)
    curves: Floats = fitted_curves(errors, choices.recipe.allowed_widths[0]) * weight[:, None]
    return curves
