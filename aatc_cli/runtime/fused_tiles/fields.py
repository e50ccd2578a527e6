"""Where the digits of every code lie in a tile of records, so that whole tiles are read by a few gathers.

Reading record by record takes a launch or more for each head, class, side and size of digits, and a prompt that goes on
from packed tokens reads them in every layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from aatc_cli.runtime.fused_tiles.digits import ROWS, Digits


@dataclass(frozen=True)
class Stored:
    """Digits of one side of a head's records of a class: records ``size`` bytes apart from byte ``start`` on.

    digits: those of every size, and at which byte of a record they begin; none where nothing is kept.
    """

    start: int
    size: int
    digits: Sequence[tuple[Digits, int]]


@dataclass(frozen=True)
class Fields:
    """Of one side, up to K digits of every code: byte of the tile, shift in it, mask, and shift in the code.

    byte int32 [K, t H E], right and mask uint8 and left int32 [K, t, H, E]; a code of fewer digits has masks of zero.
    """

    byte: Tensor
    right: Tensor
    mask: Tensor
    left: Tensor

    @classmethod
    def of(cls, stored: Sequence[Sequence[Stored]], quotas: Sequence[int], size: int) -> Fields:
        """Of codes [t, H, E] that are ``stored`` by head and class; E is ``size``."""
        slots = [[_slots(part.digits) for part in row] for row in stored]
        most = max((slot + 1 for row in slots for part in row for digits in part for slot in digits), default=1)
        shape = (most, sum(quotas), len(stored), size)
        byte, right, mask, left = (torch.zeros(shape, dtype=torch.int32) for _ in range(4))
        firsts = list(accumulate(quotas, initial=0))
        for head, row in enumerate(stored):
            for k, part in enumerate(row):
                for (digits, start), slot in zip(part.digits, slots[head][k], strict=True):
                    at, shift = _places(digits)
                    records, count = quotas[k] // ROWS, len(digits.channels)
                    lead = torch.arange(records)[:, None, None] * part.size + part.start + start
                    rows = firsts[k] + torch.arange(quotas[k])[:, None]
                    place = torch.tensor(slot)[None], rows, head, torch.tensor(digits.channels)[None]
                    byte[place] = (lead + at[:, :count]).flatten(0, 1).to(torch.int32)
                    right[place] = shift[:, :count].repeat(records, 1).to(torch.int32)
                    mask[place] = 2**digits.bits - 1
                    left[place] = torch.tensor(digits.shifts, dtype=torch.int32)[None].expand(quotas[k], -1)
        return cls(byte.flatten(1), right.to(torch.uint8), mask.to(torch.uint8), left)

    def to(self, device: torch.device) -> Fields:
        """The same on a device."""
        return Fields(self.byte.to(device), self.right.to(device), self.mask.to(device), self.left.to(device))

    def codes(self, data: Tensor) -> Tensor:
        """Codes u int32 [..., t, H, E] of tiles uint8 [..., nbytes]."""
        found = torch.zeros(*data.shape[:-1], *self.right.shape[1:], dtype=torch.int32, device=data.device)
        for byte, right, mask, left in zip(self.byte, self.right, self.mask, self.left, strict=True):
            picked = data.index_select(-1, byte).view(found.shape)
            found += ((picked >> right) & mask).to(torch.int32) << left
        return found


def _slots(digits: Sequence[tuple[Digits, int]]) -> list[list[int]]:
    """Of every digit, of which number of its channel it is."""
    taken: Counter[int] = Counter()
    found = []
    for each, _ in digits:
        found.append(list[int]())
        for channel in each.channels:
            found[-1].append(taken[channel])
            taken[channel] += 1
    return found


def _places(digits: Digits) -> tuple[Tensor, Tensor]:
    """Byte and shift in it, [16, n] each, of every token's digits."""
    token, digit = digits.fields(torch.device("cpu"))
    byte, shift = (torch.zeros(ROWS, digits.count, dtype=torch.int64) for _ in range(2))
    byte[token, digit] = torch.arange(digits.nbytes)[:, None].expand_as(digit)
    shift[token, digit] = (digits.bits * torch.arange(8 // digits.bits)).expand_as(digit)
    return byte, shift
