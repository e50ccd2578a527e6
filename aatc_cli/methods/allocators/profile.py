"""Global: one profile of widths over the channel index, the same in all layers (an ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aatc_cli.methods.allocators.pooled import Pooled

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, Ints
    from aatc_cli.core.filling import Filling


class GlobalProfile(Pooled):
    """Widths by the mean energy of a channel index."""

    name = "global"
    meaning = "one profile of widths over the channel index, shared by all layers"

    def fill(self, pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
        """The mean site, filled once."""
        import numpy as np

        from aatc_cli.core.filling import fill_sites

        profile = fill_sites([np.mean(np.stack(pool), axis=0)], budget // len(pool), rule)[0]
        return [profile.copy() for _ in pool]
