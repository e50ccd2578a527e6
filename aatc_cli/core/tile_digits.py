"""Digits of one size of a head group's codes in a tile: which they are, and the words that sixteen of them fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.tile_bytes import DIGITS

# the words of a plane, by the bits of its digits
_WORDS = {2: torch.int32, 1: torch.int16}


@dataclass(frozen=True)
class Digits:
    """Digits of one size of one head group: channel and shift of each, [n]; ``bits`` a digit."""

    bits: int
    channel: Tensor
    shift: Tensor

    @property
    def planes(self) -> int:
        """Planes of sixteen digits, the last of them part empty."""
        return -(-self.channel.numel() // DIGITS)

    def pack(self, codes: Tensor) -> Tensor:
        """Bytes [..., planes * q * word] of codes u [..., q, E] int64."""
        digits = (codes[..., self.channel] >> self.shift) & (2**self.bits - 1)
        digits = torch.nn.functional.pad(digits, (0, self.planes * DIGITS - digits.shape[-1]))
        places = self.bits * torch.arange(DIGITS, device=codes.device)
        words = (torch.unflatten(digits, -1, (self.planes, DIGITS)) << places).sum(-1).transpose(-1, -2)
        found: Tensor = words.to(_WORDS[self.bits]).contiguous().flatten(-2).view(torch.uint8)
        return found

    def unpack(self, data: Tensor, count: int, size: int) -> Tensor:
        """What these digits of ``count`` tokens add to their codes u [..., q, E] int64, from their bytes."""
        words = torch.unflatten(data.contiguous().view(_WORDS[self.bits]).to(torch.int64), -1, (self.planes, count))
        places = self.bits * torch.arange(DIGITS, device=data.device)
        digits = ((words.transpose(-1, -2)[..., None] >> places) & (2**self.bits - 1)).flatten(-2)
        mine = digits[..., : self.channel.numel()] << self.shift
        found: Tensor = mine.new_zeros(*mine.shape[:-1], size).index_add_(-1, self.channel, mine)
        return found


def digits_of(widths: Tensor, bits: int, device: torch.device) -> Digits:
    """The digits of ``bits`` bits of the channels with these widths [E]."""
    return digits_of_all([(widths, bits)], device)[0]


def digits_of_all(wanted: Sequence[tuple[Tensor, int]], device: torch.device) -> list[Digits]:
    """`digits_of` of several widths on the host and bits, brought to the device at once."""
    found = []
    for widths, bits in wanted:
        places = []
        for channel, width in enumerate(widths.tolist()):
            odd = width % 2
            count = width // 2 if bits == 2 else odd
            places += [(channel, odd + 2 * step if bits == 2 else 0) for step in range(count)]
        found.append(places)
    whole = torch.tensor([place for places in found for place in places], dtype=torch.int64).view(-1, 2).to(device)
    tables = torch.split(whole, [len(places) for places in found])
    return [Digits(bits, table[:, 0], table[:, 1]) for (_, bits), table in zip(wanted, tables, strict=True)]
