"""Query codes: parts of a head as indices of fitted points, keys where error is what queries see (A2ATS)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer
from aatc_cli.methods.quantizers.head_rows import head_rows

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

# widths for which points are placed: parts of 8, 4 and 2 channels
WIDTHS = (1, 2, 4)


class QueryCodes(Quantizer):
    """Source: A2ATS (2502.12665). Its tables are the points of every width and the root of the queries' moment."""

    name = "query-codes"
    meaning = "parts of a head as the nearest of 256 points, keys in coordinates where error is score"
    goes_with = together(allocator=("one-width",), transform=("identity",), coordinates=("pre-rope",))
    asked = True
    fitted = True

    def check(self, recipe: RecipeFields) -> None:
        """Widths that a code of 8 bits comes to."""
        if not set(recipe.allowed_widths) <= set(WIDTHS):
            raise ValueError(f'quantizer "query-codes" has widths {", ".join(map(str, WIDTHS))}')

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """``points_b`` [H, parts, 256, 8 / b] of every width that fits a head, and for keys ``root`` [H, D, D]."""
        import torch

        from aatc_cli.core.vector_codes import CODE_BITS, place_points, score_root

        rows = head_rows(latents(), int(stats.q_outer.shape[0]))
        found: dict[str, Tensor] = {}
        if side == "k":
            found["root"] = score_root(stats.q_outer / stats.count)
            rows = rows @ found["root"]
        for bits in WIDTHS:
            size = CODE_BITS // bits
            if rows.shape[-1] % size == 0:
                # one head at a time: distances of all parts to all points are in memory together
                parts = [place_points(torch.unflatten(head, -1, (-1, size)).transpose(0, 1)) for head in rows]
                found[f"points_{bits}"] = torch.stack(parts)
        return found

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """The points, and for keys the inverse of the root, in float16."""
        from aatc_cli.core.overheads import HALF, Overheads
        from aatc_cli.core.vector_codes import POINTS

        coded = sum(any(widths) for layer in bits for widths in layer.values())
        keys = sum(any(layer["k"]) for layer in bits)
        return Overheads(
            {},
            {
                "points": coded * geometry.channels * POINTS * HALF,
                "roots": keys * geometry.channels * geometry.head_dim * HALF,
            },
        )

    def codec(self, choices: Choices, site: Site) -> Any:
        """Raises `ArtifactError` where no points were placed for heads of this width."""
        import torch

        from aatc_cli.core.vector_codes import CODE_BITS, POINTS, ProductCodec

        bits, heads, dim = max(site.widths), site.geometry.kv_heads, site.geometry.head_dim
        size = CODE_BITS // bits
        points = site.read(f"points_{bits}", (heads, dim // size, POINTS, size)).to(torch.float32)
        root = site.read("root", (heads, dim, dim)).to(torch.float64) if site.side == "k" else None
        return ProductCodec(points, root)
