"""Tables of allocators as they lie in a Transform: one array for every layer and side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Floats
    from aatc_cli.methods.sites import Tensors


def site_arrays(tensors: Tensors, layers: int, name: str, shape: tuple[int, ...]) -> list[dict[Side, Floats]]:
    """The tensor ``name`` of every site in float64, which may be infinite; raises `ArtifactError` on another shape."""
    from aatc_cli.core import SIDES

    return [
        {side: tensors.numbers(f"layers.{layer}.{side}.{name}", shape) for side in SIDES} for layer in range(layers)
    ]
