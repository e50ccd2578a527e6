"""8-bit floats with scale one, as engines call an fp8 cache without calibrated scales."""

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


class Float8(Quantizer):
    """E4M3: 4 exponent and 3 mantissa bits."""

    name = "float8"
    meaning = "8-bit floats (E4M3) with scale one"
    goes_with = together(allocator=("one-width",), transform=("identity",))

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Nothing beside its codes."""
        from aatc_cli.core.overheads import Overheads

        return Overheads({})

    def codec(self, choices: Choices, site: Site) -> Any:
        """The same for all sites."""
        from aatc_cli.core.plain import Float8Codec

        return Float8Codec()
