"""What the recent tokens of a cache have received so far, and how a step's share of it is taken again.

A tile's tokens are ranked by it when they leave the window. Queries are not kept, so what a query paid cannot be found
again: while steps may be taken back, what each of them paid is written down beside the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aatc_cli.config import Window


@dataclass(frozen=True)
class Paid:
    """What some queries paid the tokens from ``place`` (behind the sinks) on: [b, orders, n]."""

    place: int
    shares: Tensor


@dataclass(frozen=True)
class Taken:
    """Tokens that were appended together: ``ahead`` [b, orders, n] they had received before, and what was paid.

    before: by their own queries as they attended to the cache before they were in it; after: by them out of the cache.
    """

    count: int
    ahead: Tensor
    before: Paid | None = None
    after: Paid | None = None


class Received:
    """Sums [b, orders, slots] in float32 over the slots of the window's ring, and the steps that may be taken again."""

    def __init__(self, window: Window, empty: Tensor) -> None:
        self.window, self.sums = window, empty
        self.taken: list[Taken] | None = None
        # of tokens that attended before they were appended
        self._ahead: Tensor | None = None
        self._before: Paid | None = None

    def prompt(self, shares: Tensor) -> None:
        """First tokens attended to themselves: what each of them received of it, [b, orders, n]."""
        self._ahead = shares.to(self.sums)

    def paid(self, place: int, shares: Tensor, stored: int) -> None:
        """Queries paid ``shares`` [b, orders, n] to the tokens from ``place`` on, the first ``stored`` of them stored.

        Places count behind the sinks. Shares of what is not stored yet go to the tokens that are appended next.
        """
        found = Paid(place, shares[..., :stored].to(self.sums))
        self._pay(found)
        if shares.shape[2] > stored:
            self._ahead, self._before = shares[..., stored:].to(self.sums), found
        elif self.taken:
            self.taken[-1] = replace(self.taken[-1], after=found)

    def next(self, count: int) -> Tensor:
        """What the next ``count`` tokens, which are appended now, have received already: [b, orders, count]."""
        ahead = self.sums.new_zeros(*self.sums.shape[:2], count) if self._ahead is None else self._ahead
        if self.taken is not None:
            self.taken.append(Taken(count, ahead, self._before))
        self._ahead = self._before = None
        return ahead

    def begin(self, step: Taken) -> None:
        """Take a step again that was taken before: to be followed by its tokens, and by `end`."""
        if step.before is not None:
            self._pay(step.before)
        self._ahead = step.ahead

    def end(self, step: Taken) -> None:
        """The tokens of a step are appended again."""
        if step.after is not None:
            self._pay(step.after)

    def write(self, ahead: Tensor, before: int) -> None:
        """Write what new tokens [b, orders, n] have received into their slots; ``before`` tokens were there."""
        after = before + ahead.shape[2]
        slots = min(after, self.window.recent)
        if slots > self.sums.shape[2]:
            self.sums = torch.nn.functional.pad(self.sums, (0, slots - self.sums.shape[2]))
        start = max(before, after - self.window.recent)
        places = torch.arange(start, after, device=self.sums.device) % self.window.recent
        self.sums[..., places] = ahead[..., start - before :]

    def _pay(self, paid: Paid) -> None:
        places = torch.arange(paid.place, paid.place + paid.shares.shape[2], device=self.sums.device)
        self.sums[..., places % self.window.recent] += paid.shares
