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

from aatc_cli.core import Side
from aatc_cli.runtime.fused_tiles.digits import ROWS, SIZES, Digits, bytes_read

_VALUES = 256
# digits of each size by the place of their highest bit, and none
_NONE = 8 * len(SIZES)


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
    """Of one side, up to K digits of every code: byte of the tile, how it lies in it, and shift in the code.

    byte int32 [K, t H E], kind uint8 and left int32 [K, t, H, E]; a code of fewer digits has some of no kind. digits
    uint8 [25 * 256]: the digit of each kind in any byte.
    """

    byte: Tensor
    kind: Tensor
    left: Tensor
    digits: Tensor

    @classmethod
    def of(cls, stored: Sequence[Sequence[Stored]], quotas: Sequence[int], size: int, side: Side) -> Fields:
        """Of codes [t, H, E] of a side that are ``stored`` by head and class; E is ``size``."""
        slots = [[_slots(part.digits) for part in row] for row in stored]
        most = max((slot + 1 for row in slots for part in row for digits in part for slot in digits), default=1)
        shape = (most, sum(quotas), len(stored), size)
        byte, kind, left = (torch.full(shape, fill, dtype=torch.int32) for fill in (0, _NONE, 0))
        firsts = list(accumulate(quotas, initial=0))
        for head, row in enumerate(stored):
            for k, part in enumerate(row):
                for (digits, start), slot in zip(part.digits, slots[head][k], strict=True):
                    at, top = _places(digits)
                    records, count = quotas[k] // ROWS, len(digits.channels)
                    lead = torch.arange(records)[:, None, None] * part.size + part.start + start
                    rows = firsts[k] + torch.arange(quotas[k])[:, None]
                    place = torch.tensor(slot)[None], rows, head, torch.tensor(digits.channels)[None]
                    byte[place] = (lead + at[:, :count]).flatten(0, 1).to(torch.int32)
                    kind[place] = (8 * SIZES.index(digits.bits) + top[:, :count]).repeat(records, 1).to(torch.int32)
                    left[place] = torch.tensor(digits.shifts, dtype=torch.int32)[None].expand(quotas[k], -1)
        read = torch.cat([bytes_read(side, bits) for bits in SIZES] + [torch.zeros(1, _VALUES, dtype=torch.uint8)])
        return cls(byte.flatten(1), kind.to(torch.uint8), left, read.flatten())

    def to(self, device: torch.device) -> Fields:
        """The same on a device."""
        return Fields(self.byte.to(device), self.kind.to(device), self.left.to(device), self.digits.to(device))

    def codes(self, data: Tensor) -> Tensor:
        """Codes u int32 [..., t, H, E] of tiles uint8 [..., nbytes]."""
        found = torch.zeros(*data.shape[:-1], *self.kind.shape[1:], dtype=torch.int32, device=data.device)
        for byte, kind, left in zip(self.byte, self.kind, self.left, strict=True):
            picked = data.index_select(-1, byte).view(found.shape)
            place = picked.to(torch.int32) + _VALUES * kind.to(torch.int32)
            found += self.digits.index_select(0, place.flatten()).view(found.shape).to(torch.int32) << left
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
    """Byte and place in it of the highest bit, [16, n] each, of every token's digits."""
    token, digit, bit = digits.places(torch.device("cpu"))
    byte, top = (torch.zeros(ROWS, digits.count, dtype=torch.int64) for _ in range(2))
    highest = bit == digits.bits - 1
    byte[token[highest], digit[highest]] = torch.arange(digits.nbytes)[:, None].expand_as(digit)[highest]
    top[token[highest], digit[highest]] = torch.arange(8).expand_as(digit)[highest]
    return byte, top
