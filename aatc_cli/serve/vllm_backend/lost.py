"""Requests that lost their blocks to others: counted, said with the plan's name, and the latest of them kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aatc_cli.console import say

# of how many it is remembered with how many tokens
KEPT = 1024


class Lost:
    """How many requests of a plan were preempted, and the latest ones (id, cached tokens)."""

    def __init__(self, plan: str) -> None:
        self.plan, self.count = plan, 0
        self.latest: deque[tuple[str, int]] = deque(maxlen=KEPT)

    def add(self, requests: Sequence[tuple[str, int]]) -> None:
        """Note requests; said of the first one and whenever their number has doubled, so that a log stays readable."""
        before, self.count = self.count, self.count + len(requests)
        self.latest.extend(requests)
        if self.count.bit_length() > before.bit_length():
            times = "once" if self.count == 1 else f"{self.count:,} times so far"
            say(
                f"aatc: {self.plan}: no block was free, {times}: request {requests[-1][0]} gave up its "
                f"{requests[-1][1]:,} tokens and is read again; more memory or fewer --max-num-seqs avoid it"
            )
