"""VATP: attention received so far, times the size of the value it fetched.

Source: Value-Aware Token Pruning (2406.12335), on the sums of H2O: times the l1 norm of the value. Values of the first
tokens are small, so these are kept whatever they score; the original keeps 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import over
from aatc_cli.methods.presses.h2o import HeavyHitters

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen

FIRST = 20


class Vatp(HeavyHitters):
    """By attention times the norm of the value."""

    name = "vatp"
    meaning = "attention received so far times the l1 norm of the value"

    def score(self, seen: Seen) -> Tensor:
        """Sum times norm, above all the first tokens."""
        sums = super().score(seen)
        return over(seen, sums * seen.values.to(sums.dtype).abs().sum(-1), FIRST)
