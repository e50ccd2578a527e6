"""H2O: tokens that received most attention so far stay.

Source: Heavy-Hitter Oracle (2306.14048): attention weights summed over all queries since a token came, and over the
query heads of its kv head; tokens are dropped for good, the lowest sum first. Its recent half is the recipe's window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen


class HeavyHitters(Press):
    """By the sum of attention."""

    name = "h2o"
    meaning = "most attention received so far"
    acts = "flush"
    sums = True

    def score(self, seen: Seen) -> Tensor:
        """The sum."""
        assert seen.received is not None
        return seen.received
