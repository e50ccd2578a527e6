"""CAOTE: how far the attention output would move if a token were gone.

With weights a over the tokens in the cache and output o = sum a v, the output without token j is off by

    a_j / (1 - a_j) |o - v_j|

Source: CAOTE (2504.14051), on the sums of H2O, which stand for the weights when they are divided by their own sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.presses.h2o import HeavyHitters

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen

# of a token that has all the attention there is
_LEAST = 1e-6


class Caote(HeavyHitters):
    """By the error of the output."""

    name = "caote"
    meaning = "error of the attention output without the token"

    def score(self, seen: Seen) -> Tensor:
        """Errors, weights and output being of a kv head."""
        import torch

        sums = super().score(seen) * seen.held
        share = sums / sums.sum(-1, keepdim=True).clamp_min(torch.finfo(sums.dtype).tiny)
        values = seen.values.to(sums.dtype)
        output = share[..., None, :] @ values
        moved: Tensor = share / (1 - share).clamp_min(_LEAST) * (output - values).norm(dim=-1)
        return moved
