"""Where in a tile the digits of all codes lie, its token scales and places, so that tiles are read by a few gathers.

Records are many small parts: of every head and class, digits of three sizes of two sides. Read one after another they
are some hundred launches a layer on a GPU, whatever there is to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.scales import unpack_scales
from aatc_cli.runtime.fused_tiles.digits import ROWS, Digits

# digits that are read at once
_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Reading:
    """Of tiles of t tokens, H heads of E channels. A code is the sum of its digits.

    byte, field, mask, lift, place [n]: of every digit its byte in the tile, the lowest of its bits there, what it may
    be, its lowest bit in the code, and the place of the code in [2, t, H, E], sides first. scales int64 [2, t, H] and
    places [H, t]: bytes of the scale and of the place of every row; -1 where a head keeps nothing of it.
    """

    byte: Tensor
    field: Tensor
    mask: Tensor
    lift: Tensor
    place: Tensor
    scales: Tensor
    places: Tensor
    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, records: Sequence[Sequence[Any]], starts: Sequence[Sequence[int]], form: tuple[Any, int]) -> Reading:
        """Of ``records`` by head and class, the first of which begin at ``starts``; form: quotas of classes, and E."""
        quotas, size = form
        rows, heads = sum(quotas), len(records)
        scales, places = torch.full((2, rows, heads), -1), torch.full((heads, rows), -1)
        parts = []
        for head, mine in enumerate(records):
            firsts = accumulate(quotas, initial=0)
            for record, start, quota, first in zip(mine, starts[head], quotas, firsts, strict=False):
                if not record.nbytes:
                    continue
                at = start + record.nbytes * torch.arange(quota // ROWS)[:, None]
                slot = first + torch.arange(quota).view(-1, ROWS)
                header = at + torch.arange(ROWS)
                places[head, slot] = header
                scales[0, slot, head], scales[1, slot, head] = header + ROWS, header + 2 * ROWS
                for side, name in enumerate(("k", "v")):
                    for digits, begin in zip(record.digits[name], record.starts[name], strict=True):
                        for byte, row, channel, rest in _digits(digits):
                            code = ((side * rows + slot[:, row]) * heads + head) * size + channel
                            parts.append(torch.stack((at + begin + byte, code, *(x.expand_as(code) for x in rest))))
        empty = torch.zeros(5, 0, dtype=torch.int64)
        byte, code, field, mask, lift = torch.cat([empty, *(part.flatten(1) for part in parts)], 1)
        field, mask, lift = (x.to(torch.int32) for x in (field, mask, lift))
        return cls(byte, field, mask, lift, code, scales, places, (2, rows, heads, size))

    def to(self, device: torch.device) -> Reading:
        """The same on a device."""
        tensors = ("byte", "field", "mask", "lift", "place", "scales", "places")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def codes(self, data: Tensor) -> Tensor:
        """Codes u int64 [P, 2, t, H, E] of tiles [P, nbytes]."""
        out = data.new_zeros(data.shape[0], *self.shape, dtype=torch.int64)
        step = max(_AT_ONCE // max(self.byte.numel(), 1), 1)
        for start in range(0, data.shape[0], step):
            part = slice(start, start + step)
            digits = data[part].index_select(1, self.byte).to(torch.int32)
            digits = ((digits >> self.field) & self.mask) << self.lift
            out[part].flatten(1).index_add_(1, self.place, digits.to(torch.int64))
        return out

    def alpha(self, data: Tensor) -> Tensor:
        """Token scales float16 [P, 2, t, H] of tiles [P, nbytes]; zero where nothing is kept."""
        found = unpack_scales(data[:, self.scales.clamp_min(0)])
        return found.masked_fill_(self.scales < 0, 0.0)

    def rows(self, data: Tensor) -> Tensor:
        """Places int64 [P, H, t] of the rows of tiles [P, nbytes]; those of rows that nothing is kept of are wrong."""
        return data[:, self.places.clamp_min(0)].to(torch.int64)


def _digits(digits: Digits) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]]:
    """Of the digits of a record: byte in it, row, channel, and (field, mask, lift), each [n], if there are any."""
    if not digits.count:
        return
    row, digit = digits.fields(torch.device("cpu"))
    byte = torch.arange(digits.nbytes)[:, None].expand_as(row)
    field = (digits.bits * torch.arange(8 // digits.bits)).expand_as(row)
    live = digit < len(digits.channels)
    channel, shift = torch.tensor((digits.channels, digits.shifts), dtype=torch.int64)[:, digit[live]]
    mask = torch.full_like(channel, 2**digits.bits - 1)
    yield byte[live], row[live], channel, (field[live], mask, shift)
