"""Expected Attention: attention that queries to come would pay a token, times what its value does to the output.

Source: Expected Attention (2510.00636): queries of the next 512 positions are taken for normal, with mean and
covariance of the prompt's own (`core.press.expected`); the weight is multiplied by the norm of the value behind the
output projection, and the heads of a layer share places as in AdaKV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen

AHEAD, SKIPPED = 512, 4


class ExpectedAttention(Press):
    """By what is to be expected."""

    name = "expected-attention"
    meaning = "attention expected of queries to come times the norm of the value behind the output projection"
    output = True
    spread = "layer"
    floor = 0.2

    def score(self, seen: Seen) -> Tensor:
        """Mean over query heads of expected weight times norm."""
        import torch

        from aatc_cli.core.press.expected import expected_attention

        assert seen.prompt is not None
        heads, group = int(seen.values.shape[1]), seen.prompt.group
        weights = expected_attention(seen.prompt, SKIPPED, AHEAD)
        rows = seen.facts.output_by_head(heads * group).to(weights.dtype)
        values = seen.values.to(weights.dtype).repeat_interleave(group, 1)
        # |v W|^2 = v (W W^T) v^T, which needs no vector of the model's width for every token
        norms = ((values @ (rows @ rows.mT)) * values).sum(-1).clamp_min(0).sqrt()
        return torch.unflatten(weights * norms, 1, (heads, group)).mean(2)
