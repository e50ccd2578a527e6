"""Commuting codes: a head as a sum of entries of stages, those of keys closed under quarter turns (CommVQ)."""

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

WIDEST = 2


class Commuting(Quantizer):
    """Source: CommVQ (2506.18879), 1 and 2 bits. Its table holds the entries of all stages; 1 bit reads the first."""

    name = "commuting-codes"
    meaning = "a head as a sum of entries of 6 bits each, those of keys commuting with RoPE"
    goes_with = together(allocator=("one-width",), transform=("identity",), coordinates=("pre-rope",))
    asked = True
    fitted = True

    def check(self, recipe: RecipeFields) -> None:
        """Widths that the stages reach."""
        if recipe.allowed_widths[-1] > WIDEST:
            raise ValueError(f'quantizer "commuting-codes" has widths of 1 to {WIDEST} bits')

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """``entries`` [H, stages, 16, D] of keys, whose turns are the others, or [H, stages, 64, D] of values.

        Raises `AatcError` for heads of an odd number of channels, or too few for a stage.
        """
        from aatc_cli.core.additive_codes import place_commuting, place_entries, stages_of
        from aatc_cli.errors import AatcError

        rows = head_rows(latents(), int(stats.q_outer.shape[0]))
        dim = int(rows.shape[-1])
        if dim % 2 or not stages_of(1, dim):
            raise AatcError(f"heads of {dim} channels are too few for a stage of 6 bits", "use another recipe")
        place = place_commuting if side == "k" else place_entries
        return {"entries": place(rows, stages_of(WIDEST, dim))}

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """Entries of the stages in float16, of keys those that are turned."""
        from aatc_cli.core.additive_codes import ENTRIES, TURNS, stages_of
        from aatc_cli.core.overheads import HALF, Overheads

        keys = sum(stages_of(max(layer["k"]), geometry.head_dim) for layer in bits)
        values = sum(stages_of(max(layer["v"]), geometry.head_dim) for layer in bits)
        numbers = (keys * (ENTRIES // TURNS) + values * ENTRIES) * geometry.channels
        return Overheads({}, {"entries": numbers * HALF})

    def codec(self, choices: Choices, site: Site) -> Any:
        """As many stages as the width pays."""
        import torch

        from aatc_cli.core.additive_codes import ENTRIES, TURNS, AdditiveCodec, stages_of, turned

        heads, dim = site.geometry.kv_heads, site.geometry.head_dim
        count = ENTRIES // TURNS if site.side == "k" else ENTRIES
        entries = site.read("entries", (heads, stages_of(WIDEST, dim), count, dim)).to(torch.float32)
        used = entries[:, : stages_of(max(site.widths), dim)]
        return AdditiveCodec(turned(used) if site.side == "k" else used)
