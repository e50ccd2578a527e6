"""Digits of a record: the bits of codes in the order in which lanes of a warp read them, for 16 tokens of one class.

A code of w bits is a digit of one bit where w is odd, and above it digits of two bits, two of which may be one of four.
Digits of one size of one side lie together, `STEP` of them in a step of a product; of lane l = 4 g + t

    keys    tokens as rows, g and g + 8; a word has digits 8 t .. 8 t + 7 of a step, one or two bytes of four of them
            bits 4: byte b of word n  digit 8 t + 4 n + b   of tokens g | g + 8
                 2: byte b            digits 8 t + b, 8 t + 4 + b of token g, then of token g + 8
                 1: byte b            as of 2 bits, of one step in bits 0 .. 3 and of the next in bits 4 .. 7; of a last
                                      step without a next one those of lane t = 2 n in bits 0 .. 3, of 2 n + 1 above
    values  digits as rows; byte b of a word is of token 2 t + (0, 8, 1, 9)[b], its fields of neighbouring digits
            bits 4: digits 2 g, 2 g + 1 of 16        2: 4 g .. 4 g + 3 of 32        1: 8 g .. 8 g + 7 of 64,
            and of a last step of one bit without a next one 4 g .. 4 g + 3, half of the word of g / 2

so that one mask is an operand, whatever lies beside it. Words lie such that the last of them may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from aatc_cli.core import Side

ROWS = 16
# bits of digits, in the order in which they lie
SIZES = (4, 2, 1)
# digits of a step
STEP = 32
# digits that lie together, by bits: words of one t or one g
_WORDS: dict[Side, dict[int, int]] = {"k": {4: 8, 2: 8, 1: 16}, "v": {4: 2, 2: 4, 1: 8}}
_TOKENS = (0, 8, 1, 9)
# how much more digits of keys in the upper half of a step count, by bits
_UPPER = {4: 0, 2: 3, 1: 1}


@dataclass(frozen=True)
class Digits:
    """Digits of one size of one side of a record: the channel of each, and the shift of its lowest bit in the code."""

    side: Side
    bits: int
    channels: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Digits, and places for more where the last words are not full."""
        together = _WORDS[self.side][self.bits]
        return -(-len(self.channels) // together) * together

    @property
    def nbytes(self) -> int:
        """Bytes in a record."""
        return self.count * self.bits * ROWS // 8

    @property
    def steps(self) -> int:
        """Steps of a product. Words of digits of one bit are of two steps; of one alone where that is the last."""
        return -(-self.count // STEP)

    def fields(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token and digit of every field of every byte, from the lowest bits on: int64 [nbytes, 8 / bits] each."""
        return _fields(self.side, self.bits, self.nbytes, device)

    def pack(self, codes: Tensor) -> Tensor:
        """Bytes [..., nbytes] of codes u [..., 16, E]."""
        token, digit = self.fields(codes.device)
        field = self._digits(codes)[..., token, digit] << (
            self.bits * torch.arange(8 // self.bits, device=codes.device)
        )
        found: Tensor = field.sum(-1).to(torch.uint8)
        return found

    def middled(self, codes: Tensor) -> Tensor:
        """Digits of codes u [..., E] from the middle of what they may be: float64 [..., n]."""
        channel, shift = self._tables(codes.device)
        digits: Tensor = (codes[..., channel] >> shift) & (2**self.bits - 1)
        found: Tensor = digits.to(torch.float64) - (2**self.bits - 1) / 2
        return found

    def _digits(self, codes: Tensor) -> Tensor:
        channel, shift = self._tables(codes.device)
        found = (codes[..., channel] >> shift) & (2**self.bits - 1)
        return torch.nn.functional.pad(found, (0, self.count - channel.numel()))

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Channels and shifts on a device, made once: a copy is more than the rest of what is done with them."""
        if device not in self._made:
            both = torch.tensor((self.channels, self.shifts), dtype=torch.int64).to(device)
            self._made[device] = both[0], both[1]
        return self._made[device]

    @cached_property
    def _made(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


def digits_of(widths: Sequence[int], side: Side) -> list[Digits]:
    """Digits of 4, 2 and 1 bits of the channels [E] of a head, those with most bits first, in the fewest steps.

    How many channels have a digit of four bits is chosen: as few as that takes.
    """
    order = sorted((c for c in range(len(widths)) if widths[c]), key=lambda c: (-widths[c], c))
    most = sum(widths[c] >= SIZES[0] for c in order)
    found = [_cut(order, widths, side, count) for count in sorted({*range(0, most, ROWS), most})]
    return min(found, key=lambda part: (sum(digits.nbytes for digits in part), sum(digits.steps for digits in part)))


def key_place(bits: int, digit: int, steps: int) -> tuple[int, int, int]:
    """Of a digit of keys: its step, its row among the 32 of the step, and how much it counts in an operand.

    steps: of this size in the form of the class, of which an odd last one has digits of one bit of its own.
    """
    if bits == 1 and digit < STEP * (steps - steps % 2):
        unit, rest = divmod(digit, 2 * STEP)
        t, odd, half, byte = rest // 16, rest // 8 % 2, rest // 4 % 2, rest % 4
        return 2 * unit + odd, 16 * half + 4 * t + byte, 1 + half
    step, rest = divmod(digit, STEP)
    half = rest // 4 % 2
    return step, 16 * half + 4 * (rest // 8) + rest % 4, 1 + _UPPER[bits] * half


def value_place(bits: int, digit: int, steps: int) -> tuple[int, int, int]:
    """Of a digit of values: its step, its row in the two blocks of the step, and how much it counts in an operand.

    steps: as of keys.
    """
    alone = bits == 1 and digit >= STEP * (steps - steps % 2)
    each = 4 if alone else 8 // bits
    unit, rest = divmod(digit, 8 * each)
    g, field = divmod(rest, each)
    block = unit * each // 2 + field // 2
    return block // 2, 16 * (block % 2) + g + 8 * (field % 2), 2 ** (bits * field)


def _cut(order: Sequence[int], widths: Sequence[int], side: Side, fours: int) -> list[Digits]:
    """Digits of channels in ``order``, of which the first ``fours`` have one of four bits."""
    found: dict[int, list[tuple[int, int]]] = {bits: [] for bits in SIZES}
    for place, channel in enumerate(order):
        low, stop = widths[channel] % 2, widths[channel]
        if place < fours:
            stop -= SIZES[0]
            found[4].append((channel, stop))
        found[2] += [(channel, shift) for shift in range(low, stop, 2)]
        found[1] += [(channel, 0)] * low
    return [
        Digits(side, bits, tuple(c for c, _ in found[bits]), tuple(shift for _, shift in found[bits])) for bits in SIZES
    ]


@lru_cache(maxsize=512)
def _fields(side: Side, bits: int, nbytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    byte = torch.arange(nbytes, device=device)[:, None]
    field = torch.arange(8 // bits, device=device)
    return (_key_fields if side == "k" else _value_fields)(byte, field, bits)


def _key_fields(byte: Tensor, field: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    words = 8 if bits == 4 else 4
    unit, rest = byte // (32 * words), byte % (32 * words)
    t, g, part, b = rest // words // 8, rest // words % 8, rest % words // 4, byte % 4
    if bits == 4:
        return g + 8 * field, (STEP * unit + 8 * t + 4 * part + b).expand(-1, 2)
    row, half = field // 2 % 2, field % 2
    if bits == 2:
        return g + 8 * row, STEP * unit + 8 * t + 4 * half + b
    return g + 8 * row, 2 * STEP * unit + 16 * t + 8 * (field // 4) + 4 * half + b


def _value_fields(byte: Tensor, field: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    each = 8 // bits
    g, t = byte // 16, byte // 4 % 4
    token = 2 * t + torch.tensor(_TOKENS, device=byte.device)[byte % 4]
    return token.expand(-1, each), each * g + field
