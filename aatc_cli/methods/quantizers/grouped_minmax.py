"""Grouped min-max: groups between their least and greatest value, along channels or tokens (KIVI and most engines)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Site


class Grouped(Quantizer):
    """A float16 scale and minimum for every group."""

    name = "grouped-minmax"
    meaning = "groups between minimum and maximum"
    goes_with = together(transform=("linear",), allocator=("one-width", "rank", "per-head"))

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Scales and minima of both sides, and decode rows; raises `AatcError` where groups do not fill a token."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.overheads import HALF, Overheads
        from aatc_cli.methods.quantizers.matrices import matrix_bytes

        _require_whole(choices, geometry)
        flush = choices.recipe.window.flush
        live: dict[str, int] = {}
        for side, name in zip(SIDES, ("key", "value"), strict=True):
            pairs = flush * sum(self._pairs(choices, geometry, groups.of(side), layer[side]) for layer in bits)
            live |= {f"{name}_scales": round(pairs * HALF), f"{name}_minima": round(pairs * HALF)}
        return Overheads(live, matrix_bytes(choices, geometry, groups, bits))

    def codec(self, choices: Choices, site: Site) -> Any:
        """Groups as the recipe's ``[coding]`` says, or as the allocator does."""
        import torch

        from aatc_cli.core.grouped import GroupedMinMax

        axis, clip = self._told(choices, site.side)
        return GroupedMinMax(
            torch.tensor(site.widths, dtype=torch.int64), site.group or group_size(choices, site.geometry), axis, clip
        )

    @staticmethod
    def _told(choices: Choices, side: Side) -> tuple[Any, float]:
        coding = choices.recipe.coding
        return (coding.key_axis, coding.key_clip) if side == "k" else (coding.value_axis, coding.value_clip)

    @staticmethod
    def _pairs(choices: Choices, geometry: Geometry, groups: int, widths: Sequence[int]) -> float:
        """Pairs of scale and minimum per packed token of one site."""
        coded = sum(width > 0 for width in widths)
        if choices.allocator.truncates:
            return groups if coded else 0
        return coded / group_size(choices, geometry)


def _require_whole(choices: Choices, geometry: Geometry) -> None:
    """Raise `AatcError` where groups in a token are left with channels that fill none."""
    from aatc_cli.errors import AatcError

    coding, size = choices.recipe.coding, group_size(choices, geometry)
    in_tokens = "token" in (coding.key_axis, coding.value_axis) and not choices.allocator.truncates
    if in_tokens and geometry.channels % size:
        raise AatcError(
            f"recipe {choices.recipe.name} codes {size} channels of a token at a time, "
            f"which do not divide the {geometry.channels} of a site",
            "set coding.group in a recipe of your own to a divisor of that number",
        )


def group_size(choices: Choices, geometry: Geometry) -> int:
    """Members of a group: the recipe's number, or a head's channels."""
    return choices.recipe.coding.group or geometry.head_dim
