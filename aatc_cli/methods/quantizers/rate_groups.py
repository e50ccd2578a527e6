"""Rate groups: channels of a head that share a width, as a norm and a direction (Block-GTQ)."""

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
    from aatc_cli.methods.sites import Site


class RateGrouped(Quantizer):
    """Source: Block-GTQ (2606.24033). Its tables are energies of the pairs of channels that RoPE turns together."""

    name = "rate-groups"
    meaning = "norm and direction of the channels of a head that share a width"
    goes_with = together(allocator=("rope-pairs",), transform=("identity",), coordinates=("pre-rope",))
    asked = True

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """For keys ``pair_queries`` and ``pair_keys`` [H, D / 2]: energy in a pair, of all query heads and of keys."""
        import torch

        if side == "v":
            return {}
        heads, dim = stats.q_outer.shape[:2]
        queries = stats.q_outer.diagonal(dim1=-2, dim2=-1) / stats.count
        keys = torch.unflatten(stats.k_outer.diagonal(), 0, (heads, dim)) / stats.count
        half = dim // 2
        return {
            name: (energy[:, :half] + energy[:, half : 2 * half]).contiguous()
            for name, energy in (("pair_queries", queries), ("pair_keys", keys))
        }

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """A float16 norm for every group of a token."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.overheads import HALF, Overheads

        dim = geometry.head_dim
        count = sum(
            len(set(layer[side][first : first + dim]) - {0})
            for layer in bits
            for side in SIDES
            for first in range(0, geometry.channels, dim)
        )
        return Overheads({"norms": choices.recipe.window.flush * count * HALF})

    def codec(self, choices: Choices, site: Site) -> Any:
        """Groups are read off the widths."""
        import torch

        from aatc_cli.core.rate_groups import RateGroups

        return RateGroups(torch.tensor(site.widths), site.geometry.head_dim)
