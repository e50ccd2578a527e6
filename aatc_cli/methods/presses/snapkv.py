"""SnapKV: tokens that the last queries of a prompt look at stay, with their neighbours.

Source: SnapKV (2404.14469): weights of the last 32 queries, averaged over these, over 5 neighbouring tokens and over
the query heads of a kv head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen

QUERIES, NEIGHBOURS = 32, 5


class SnapKv(Press):
    """By the attention of the end of the prompt."""

    name = "snapkv"
    meaning = "attention of the prompt's last queries, smoothed over neighbours"

    def score(self, seen: Seen) -> Tensor:
        """The smoothed mean."""
        import torch

        assert seen.prompt is not None
        weights = seen.prompt.recent(QUERIES)
        smooth = torch.nn.functional.avg_pool1d(weights, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
        return torch.unflatten(smooth, 1, (-1, seen.prompt.group)).mean(2)
