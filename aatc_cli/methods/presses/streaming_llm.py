"""StreamingLLM: the first tokens and the latest ones stay.

Source: StreamingLLM (2309.17453). Its first tokens are the recipe's sinks; its rolling window is the recent tokens and,
of those behind them, the latest share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen


class StreamingLlm(Press):
    """By place alone."""

    name = "streaming-llm"
    meaning = "the latest tokens"
    acts = "flush"

    def score(self, seen: Seen) -> Tensor:
        """The place."""
        return seen.places.to(seen.values.dtype).expand(seen.held.shape)
