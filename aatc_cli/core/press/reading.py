"""What the tokens of a prompt receive when it is read a second time, and what they received of one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """Of one layer and every token of a prompt, over the query heads of its kv head, [B, H, P] each.

    largest: the largest weight of a query of the second reading. again: the sum of their squares. before: the sum of
    squared weights of the prompt's own queries that stand a window's tile or more behind.
    """

    largest: Tensor
    again: Tensor
    before: Tensor

    def row(self, place: int) -> Reading:
        """Of one of several prompts alone."""
        return Reading(*(part[place : place + 1] for part in (self.largest, self.again, self.before)))

    @classmethod
    def joined(cls, parts: list[Reading]) -> Reading:
        """Of a prompt from those of its chunks."""
        columns = zip(*((part.largest, part.again, part.before) for part in parts), strict=True)
        return cls(*(torch.cat(column, 2) for column in columns))
