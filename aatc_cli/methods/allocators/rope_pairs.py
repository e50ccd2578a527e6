"""RoPE pairs: whole bits for pairs of key channels that RoPE turns together, by their energy (Block-GTQ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.allocators.left import exponential_left
from aatc_cli.methods.allocators.one_width import width_of
from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Tensors


class RopePairs(Allocator):
    """Source: Block-GTQ (2606.24033). Every head has the budget for itself; values have one width."""

    name = "rope-pairs"
    meaning = "whole bits for pairs of key channels, by energy, per head; values all the same width"
    goes_with = together(quantizer=("rate-groups",))
    one_width = True
    fractional = False

    def check(self, recipe: RecipeFields) -> None:
        """All widths up to the widest, none dropped."""
        if recipe.min_bits < 1 or recipe.widths is not None:
            raise ValueError('allocator "rope-pairs" gives every pair a bit at least, in steps of one')

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> list[Floats]:
        """Energies [H, D / 2] of every layer's keys: half of what a query head and the keys have in a pair on average.

        Raises `AatcError` for heads that are no pairs.
        """
        from aatc_cli.errors import AatcError

        if geometry.head_dim % 2:
            raise AatcError(
                f"heads of {geometry.head_dim} channels are no pairs, to which {choices.recipe.name} gives bits",
                "use another recipe for this model",
            )
        shape = (geometry.kv_heads, geometry.head_dim // 2)
        readers = geometry.heads // geometry.kv_heads
        found: list[Floats] = []
        for layer in range(geometry.layers):
            queries, keys = (
                tensors.numbers(f"layers.{layer}.k.{part}", shape) for part in ("pair_queries", "pair_keys")
            )
            found.append((queries / readers + keys) / 2)
        return found

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Gains in order inside every head; raises `AatcError` where the budget has no width."""
        import numpy as np

        from aatc_cli.core.allocate import Allocation, exponential_curves, waterfill

        recipe, pairs = choices.recipe, tables
        layers: Sequence[Floats] = pairs
        width = width_of(recipe, average)
        bits: list[dict[Side, Ints]] = []
        for layer, table in zip(energies, layers, strict=True):
            size = layer["k"].variance.size // table.shape[0] // 2
            heads = [
                waterfill(exponential_curves(head, recipe.max_bits), math.floor(width * size), recipe.min_bits)
                for head in table
            ]
            keys = np.concatenate([np.tile(head, 2) for head in heads])
            bits.append({"k": keys, "v": np.full(layer["v"].variance.size, width, dtype=np.int64)})
        return Allocation(bits, exponential_left(choices, energies, bits), {"k": 0.0, "v": 0.0})

    def nominal_widths(self, choices: Choices, channels: int, groups: int, bits: float) -> list[int]:
        """The budget everywhere."""
        return [int(bits)] * channels
