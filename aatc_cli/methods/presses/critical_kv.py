"""CriticalKV: half of the places by attention, the others by attention times what the output projection makes of it.

Source: CriticalKV (2502.03805), on SnapKV's scores, with the places of a layer shared out over its heads as AdaKV does
(2407.11550): every head keeps a fifth of an even share, the best of all heads fill the rest. A head then gives half of
its places to its best scores s, and the others to the best (s + 1e-4) |v W_O|_1, averaged over its query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import narrowed
from aatc_cli.methods.presses.snapkv import SnapKv

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen

FIRST_STAGE, SMALL = 0.5, 1e-4


class CriticalKv(SnapKv):
    """In two stages."""

    name = "critical-kv"
    meaning = "attention of the last queries, then times the l1 norm of the value behind the output projection"
    output = True
    spread = "layer"
    floor = 0.2

    def keep(self, seen: Seen, count: int) -> Tensor:
        """The first stage, and the second among what it left."""
        from aatc_cli.core.press.choice import best, share_out

        scores = self.score(seen)
        counts = share_out(scores, seen.candidates, count, self.floor, seen.costs)
        first = (counts * FIRST_STAGE).long()
        taken = best(scores, seen.candidates, first)
        rest = narrowed(seen, taken)
        return taken | best((scores + SMALL) * self._norms(seen), rest.candidates, counts - first)

    @staticmethod
    def _norms(seen: Seen) -> Tensor:
        """l1 norms of the values behind the output projection, averaged over query heads: [B, H, T]."""
        import torch

        assert seen.prompt is not None
        group, heads = seen.prompt.group, int(seen.values.shape[1])
        total = torch.zeros(seen.held.shape, device=seen.values.device)
        for place, rows in enumerate(seen.facts.output_by_head(heads * group)):
            total[:, place // group] += (seen.values[:, place // group].float() @ rows).abs().sum(-1)
        return total / group
