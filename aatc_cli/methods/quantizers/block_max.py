"""Block max: one scale for every block of latents, the largest magnitude in it (KVTC)."""

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


class BlockMax(Quantizer):
    """Source: KVTC (2511.01815), without its entropy stage."""

    name = "block-max"
    meaning = "one scale per block, the largest magnitude in it"
    goes_with = together(allocator=("block-dp",))
    blocks = True

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """A float16 scale for every block, decode rows and means."""
        from aatc_cli.core.overheads import HALF, Overheads
        from aatc_cli.methods.quantizers.matrices import matrix_bytes

        means = {"means": 2 * geometry.layers * geometry.channels * HALF}
        live = {"block_scales": choices.recipe.window.flush * blocks * HALF}
        return Overheads(live, matrix_bytes(choices, geometry, groups, bits) | means)

    def codec(self, choices: Choices, site: Site) -> Any:
        """The blocks that the plan wrote down."""
        from aatc_cli.core.block_codec import BlockCodec
        from aatc_cli.core.precision_blocks import blocks_of

        assert site.starts is not None
        return BlockCodec(blocks_of(site.widths, site.starts))
