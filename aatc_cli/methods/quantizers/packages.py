"""What the quantizers of other packages have in common: groups of 64 numbers of a head, coded through transformers.

The objects name the package and the class; calling it needs transformers, which only `models` imports. So whoever
evaluates hands in the maker of such codecs with the sites (`sites.Sites.packaged`: it is
`models.quantized.library_codec`), and every import points downward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Library, Site

GROUP = 64


class LibraryQuantizer(Quantizer):
    """package: what to install. widths: that it has. layer: the class of transformers that calls it."""

    goes_with = together(allocator=("one-width",), transform=("identity",))
    package: ClassVar[str]
    widths: ClassVar[tuple[int, ...]]
    layer: ClassVar[str]

    def along_tokens(self, recipe: RecipeFields) -> bool:
        """Its groups run through a flush block."""
        return True

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """A float16 scale and zero point for every group."""
        from aatc_cli.core.overheads import HALF, Overheads

        pairs = choices.recipe.window.flush * 2 * geometry.layers * geometry.channels // GROUP
        return Overheads({"scales": pairs * HALF, "zero_points": pairs * HALF})

    def codec(self, choices: Choices, site: Site) -> Any:
        """What the library makes; raises `AatcError` when its package is missing or it has no such width."""
        assert site.packaged is not None
        return site.packaged(self, max(site.widths), site.geometry.kv_heads, choices.recipe.window.flush)

    def ready(self, library: Library, bits: int, flush: int) -> None:
        """A codec is made and thrown away."""
        library(self, bits, 1, flush)
