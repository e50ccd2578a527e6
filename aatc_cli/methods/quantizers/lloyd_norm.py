"""Norm of a head and the Lloyd-Max levels of a unit normal (TurboQuant's first stage)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Site


class LloydNorm(Quantizer):
    """Source: TurboQuant (2504.19874) without its second, one-bit stage."""

    name = "lloyd-norm"
    meaning = "norm of a head and levels of a unit normal"
    goes_with = together(allocator=("one-width",), transform=("uncalibrated",))

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """A float16 norm for every head of a token."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.overheads import HALF, Overheads
        from aatc_cli.methods.quantizers.matrices import matrix_bytes

        coded = sum(width > 0 for layer in bits for side in SIDES for width in layer[side])
        norms = choices.recipe.window.flush * HALF * coded // geometry.head_dim
        return Overheads({"norms": norms}, matrix_bytes(choices, geometry, groups, bits))

    def codec(self, choices: Choices, site: Site) -> Any:
        """One group for each head."""
        from aatc_cli.core.plain import NormedLloyd

        return NormedLloyd(max(site.widths), site.geometry.head_dim)
