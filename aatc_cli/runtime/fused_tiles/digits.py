"""Digits of a record: the bits of codes in the order in which lanes of a warp read them, for 16 tokens of one class.

A code of w bits is a digit of one bit where w is odd, and above it digits of two bits, two of which may be one of four.
Digits of one size of one side lie together, `STEP` of them in a step of a product; of lane l = 4 g + t

    keys    tokens as rows, g and g + 8; a word has digits 8 t .. 8 t + 7 of a step, byte b of it
            bits 4: of word n, digit 8 t + 4 n + b: of token g in bits 7, 3 .. 1, of token g + 8 in bits 0, 6 .. 4
                 2: four digits i in bits 7 - i and 3 - i: i % 2 is the token, i / 2 digit 8 t + b or 8 t + 4 + b
                 1: eight in bits 7 - i, of one step and of the next; of a last step without a next one those of lane
                    t = 2 n and of 2 n + 1
            a digit is its highest bit and, where that is set, the others turned over: a sign and a magnitude
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
# what a digit of keys counts in an operand, whose sign is set for positive ones, by bits
_COUNTED = {4: -2, 2: -8, 1: -24}
# of the bits of a byte of two digits of four bits of keys: which of the two, and the bit of it
_KEY_FOURS = ((1, 3), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3))


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

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Token, digit and bit of the digit of every bit of every byte: int64 [nbytes, 8] each."""
        return _places(self.side, self.bits, self.nbytes, device)

    def pack(self, codes: Tensor) -> Tensor:
        """Bytes [..., nbytes] of codes u [..., 16, E]."""
        token, digit, bit = self.places(codes.device)
        bits = _stored(self._digits(codes), self.side, self.bits)[..., token, digit] >> bit & 1
        found: Tensor = (bits << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)
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
        return 2 * unit + odd, 16 * half + 4 * t + byte, _COUNTED[bits]
    step, rest = divmod(digit, STEP)
    half = rest // 4 % 2
    return step, 16 * half + 4 * (rest // 8) + rest % 4, _COUNTED[bits]


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


@lru_cache
def bytes_read(side: Side, bits: int) -> Tensor:
    """The digit that any byte holds with its highest bit at a place of the byte: uint8 [8, 256]; zero where none is."""
    token, digit, bit = (part[0].tolist() for part in _places(side, bits, 1, torch.device("cpu")))
    value, found = torch.arange(256), torch.zeros(8, 256, dtype=torch.uint8)
    for top in range(8):
        if bit[top] == bits - 1:
            mine = [place for place in range(8) if (token[place], digit[place]) == (token[top], digit[top])]
            stored = torch.stack([(value >> place & 1) << bit[place] for place in mine]).sum(0)
            found[top] = _stored(stored, side, bits).to(torch.uint8)
    return found


def _stored(digits: Tensor, side: Side, bits: int) -> Tensor:
    """Digits as they are stored, and back: of keys, those in the upper half with all but the highest bit turned."""
    top = bits - 1
    return digits ^ (digits >> top) * (2**top - 1) if side == "k" else digits


@lru_cache(maxsize=512)
def _places(side: Side, bits: int, nbytes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    byte, place = torch.arange(nbytes, device=device)[:, None], torch.arange(8, device=device)
    return (_key_places if side == "k" else _value_places)(byte, place, bits)


def _key_places(byte: Tensor, place: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    words = 8 if bits == 4 else 4
    unit, rest = byte // (32 * words), byte % (32 * words)
    t, g, part, b = rest // words // 8, rest // words % 8, rest % words // 4, byte % 4
    if bits == 4:
        row, bit = torch.tensor(_KEY_FOURS, device=byte.device).T
        return g + 8 * row, (STEP * unit + 8 * t + 4 * part + b).expand(-1, 8), bit.expand(len(byte), -1)
    field = (7 - place) % (8 // bits)
    token, half, bit = (
        g + 8 * (field % 2),
        field // 2 % 2,
        (place // 4 if bits == 2 else 0 * place).expand(len(byte), -1),
    )
    if bits == 2:
        return token, STEP * unit + 8 * t + 4 * half + b, bit
    return token, 2 * STEP * unit + 16 * t + 8 * (field // 4) + 4 * half + b, bit


def _value_places(byte: Tensor, place: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    g, t = byte // 16, byte // 4 % 4
    token = 2 * t + torch.tensor(_TOKENS, device=byte.device)[byte % 4]
    return token.expand(-1, 8), 8 // bits * g + place // bits, (place % bits).expand(len(byte), -1)
