"""Bytes of the decode rows that methods without a packed cache keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core.layout import Widths
    from aatc_cli.methods.choices import Choices


def matrix_bytes(choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths) -> dict[str, int]:
    """Decode rows of coded channels in float16, by cause; nothing for maps that have no numbers of their own."""
    from aatc_cli.core import SIDES
    from aatc_cli.core.overheads import HALF

    if not choices.transform.stored:
        return {}
    counts = {side: sum(width > 0 for layer in bits for width in layer[side]) for side in SIDES}
    size = sum(counts[side] * choices.transform.span(geometry, groups.of(side)) for side in SIDES)
    return {"decode_matrices": size * HALF}
