"""Signposts: the nearest of 2^b points placed by gradient-weighted k-means, outermost values exact (KVQuant)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

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

# widths for which signposts are placed, and the share of values that KVQuant leaves to its sparse part
WIDTHS = (1, 2, 3, 4)
OUTLIERS = 0.01


class Signposts(Quantizer):
    """Source: KVQuant (2401.18079). Its tables are the points of every width and the ranges of key channels."""

    name = "nonuniform-outlier"
    meaning = "signposts, with exact outliers"
    goes_with = together(allocator=("one-width",), transform=("identity",), coordinates=("pre-rope",))
    gradients = True
    asked = True

    def along_tokens(self, recipe: RecipeFields) -> bool:
        """The exact keys are those of a flush block."""
        return True

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """``points_b`` [2^b] of every width, for keys ``low`` and ``high`` [C]; raises as `row_weights`."""
        import torch

        from aatc_cli.core.overheads import outlier_count
        from aatc_cli.core.signposts import normalized, place_signposts, token_ranges

        weights, wide = row_weights(side, stats), latents()
        found: dict[str, Tensor] = {}
        if side == "k":
            low, high = torch.quantile(wide, torch.tensor([OUTLIERS / 2, 1 - OUTLIERS / 2], dtype=torch.float64), dim=0)
            found |= {"low": low, "high": high}
            unit = normalized(wide, (high + low) / 2, (high - low) / 2)
            kept = unit.abs() <= 1
        else:
            centre, half, exact = token_ranges(wide, outlier_count(OUTLIERS, wide.shape[1]))
            unit, kept = normalized(wide, centre, half), ~exact
        values, pulls = unit[kept].numpy(), weights.expand_as(unit)[kept].numpy()
        for bits in WIDTHS:
            found[f"points_{bits}"] = torch.from_numpy(place_signposts(values, pulls, bits))
        return found

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Exact values with their places, ranges of tokens of values, and the tables."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.overheads import HALF, INDEX, Overheads, outlier_count

        flush, share = choices.recipe.window.flush, choices.recipe.coding.outliers
        kept = outlier_count(share, flush * geometry.channels) + flush * outlier_count(share, geometry.channels)
        points = sum(2 ** max(layer[side]) for layer in bits for side in SIDES)
        return Overheads(
            {"outliers": geometry.layers * kept * (HALF + INDEX), "value_ranges": flush * geometry.layers * 2 * HALF},
            {"signposts": points * HALF, "key_ranges": geometry.layers * geometry.channels * 2 * HALF},
        )

    def codec(self, choices: Choices, site: Site) -> Any:
        """Raises `ArtifactError` for a range that ends before it begins."""
        import torch

        from aatc_cli.core.signposts import SignpostCodec

        bits, recipe = max(site.widths), choices.recipe
        points = site.read(f"points_{bits}", (2**bits,)).to(torch.float32)
        if site.side == "v":
            return SignpostCodec(points, recipe.coding.outliers)
        low, high = (site.read(part, (site.geometry.channels,)) for part in ("low", "high"))
        if bool((low > high).any()):
            raise site.tensors.damaged(f"layer {site.layer} has a range of keys that ends before it begins")
        ranges = low.to(torch.float32), high.to(torch.float32)
        return SignpostCodec(points, recipe.coding.outliers, *ranges, block=recipe.window.flush)


def row_weights(side: Side, stats: LayerStats) -> Tensor:
    """Mean squared loss gradients of a site's channels, [1, C]; raises `ArtifactError` where there are none."""
    from aatc_cli.errors import ArtifactError

    mean = (stats.k_fisher if side == "k" else stats.v_fisher).diagonal()
    if not bool(mean.any()):
        raise ArtifactError(
            "signposts are weighed by loss gradients, and these Stats hold none",
            "collect with --fisher N (64 windows or more serve well), into the same run with --force",
        )
    return mean.clamp_min(0)[None] / mean.max()
