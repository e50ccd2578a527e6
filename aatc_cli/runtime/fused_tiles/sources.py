"""Which bit of a packed tile comes from which byte of codes, scales and places: found by asking the packing itself.

A kernel that has the codes of a tile need not know in which order records hold them. What it has are bytes,

    codes [64 tokens by class][keys, values][D] | scales [keys, values][64] | places [64]        of every head,

and a bit of the tile is the parity of one bit or two of one of them, or that turned over. Numbers of the bytes are
put in to see where they come out, and bit by bit which of theirs these are; the table is held to random codes. All of
it is on the host: thousands of small steps, each of which costs a GPU more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES
from aatc_cli.core.scales import unpack_scales
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused_tiles.records import RecordTiles

_BITS, _WORD = 8, 32
# bits that are set where a byte is asked for: of one bit, or of two that are at most three apart, one of these has one
_FILLS = (0b11111111, 0b01010101, 0b00110011)


@dataclass(frozen=True)
class Sources:
    """Where the bits of tiles of n words of 32 bits come from. H heads, W words of the head that has most.

    entries int32 [H, 8, W, 4]: of bit 4 q + i of word w, at [q, w, i]: the byte's place, from bit 16 on the mask of its
    bits, from bit 24 on whether their parity is turned over. places int32 [H, W]: the words of a head; counts [H].
    """

    entries: Tensor
    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, tiles: RecordTiles) -> Sources:
        """Of ``tiles``, whose codecs are on the host; raises `AatcError` for a packing that bits do not describe."""
        byte, mask, turned, owner = _found(tiles)
        _check(tiles, byte, mask, turned, owner)
        entry = (byte | mask << 16 | turned.to(torch.int64) << 24).view(-1, _BITS, 4)
        owners = owner.view(-1, _WORD).amax(1)
        if bool((owner.view(-1, _WORD) != owners[:, None])[mask.view(-1, _WORD) > 0].any()):
            raise AatcError("a word of a tile holds what is of two heads", "use --cache packed")
        words = [torch.nonzero(owners == head)[:, 0] for head in range(tiles.heads)]
        most = max(1, *(len(mine) for mine in words))
        entries = entry.new_zeros(tiles.heads, _BITS, most, 4)
        places = entry.new_zeros(tiles.heads, most)
        for head, mine in enumerate(words):
            entries[head, :, : len(mine)] = entry[mine].transpose(0, 1)
            places[head, : len(mine)] = mine
        counts = torch.tensor([len(mine) for mine in words], dtype=torch.int32, device=entry.device)
        return cls(entries.to(torch.int32), places.to(torch.int32), counts)


def domain(size: int) -> int:
    """Bytes that a head's part of a tile is made of, with heads of ``size`` dimensions."""
    return 2 * TILE * size + 3 * TILE


def packed_bits(tiles: RecordTiles, held: Tensor) -> Tensor:
    """Bits bool [P, 8 n] of the tiles that bytes ``held`` [P, H, domain] stand for."""
    size = tiles.size
    codes, scales, places = torch.split(held.to(torch.int64), [2 * TILE * size, 2 * TILE, TILE], -1)
    by_side = codes.view(*codes.shape[:-1], TILE, 2, size)
    quotas, coded = list(tiles.rule.quotas), {}
    for index, side in enumerate(SIDES):
        mine = torch.split(by_side[..., index, :].transpose(-3, -2), quotas, -3)
        alpha = unpack_scales(torch.unflatten(scales, -1, (2, TILE))[..., index, :]).transpose(-2, -1)
        coded[side] = list(zip(mine, torch.split(alpha, quotas, -2), strict=True))
    data = np.unpackbits(tiles.packed(coded, places).numpy(), axis=-1, bitorder="little")
    return torch.from_numpy(data).to(torch.bool)


def _widths(tiles: RecordTiles) -> Tensor:
    """Bits that the bytes of a head may have: int64 [H, domain]."""
    parts = []
    for side in SIDES:
        bits = tiles.sides[side].codec.bits.to(torch.int64)
        by_row = bits[tiles.rule.class_of_rank(bits.device)]
        parts.append(by_row.view(TILE, tiles.heads, tiles.size).transpose(0, 1))
    codes = torch.stack(parts, 2).flatten(1)
    return torch.nn.functional.pad(codes, (0, 3 * TILE), value=_BITS)


def _found(tiles: RecordTiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Byte, mask of its bits, whether turned over, and head of every bit of a tile; a mask of zero is a constant."""
    widths = _widths(tiles)
    heads, count = widths.shape
    full, bits = (1 << widths) - 1, 1 << torch.arange(_BITS)
    names, owners = _digits(count), _digits(heads)
    filled = [full & fill for fill in _FILLS]
    asked = [part for fill in filled for part in (names[:, None] * fill, owners[..., None] * fill)]
    whole = packed_bits(tiles, torch.cat((*asked, full & bits[:, None, None], torch.zeros_like(full)[None])))
    *seen, by_bit = torch.split(whole[:-1] != whole[-1], [*[len(names), len(owners)] * len(filled), _BITS])
    mask = _number(by_bit)
    byte, owner = (torch.stack([_number(part) for part in seen[side::2]]).amax(0) for side in range(2))
    # bits that nothing reaches go with those before them
    last = torch.cummax(torch.where(mask > 0, torch.arange(len(mask), device=mask.device), -1), 0).values.clamp_min(0)
    owner = torch.where(mask > 0, owner, owner[last]).clamp_min(1)
    return (byte - 1).clamp_min(0), mask, whole[-1], owner - 1


def _digits(count: int) -> Tensor:
    """Binary digits, the lowest first, of the numbers from 1 to ``count``: int64 [n, count]."""
    return (torch.arange(1, count + 1) >> torch.arange(count.bit_length())[:, None]) & 1


def _number(digits: Tensor) -> Tensor:
    """The numbers that bool digits [n, ...] are of, the lowest first: int64."""
    places = torch.arange(len(digits)).view(-1, *[1] * (digits.dim() - 1))
    return (digits.to(torch.int64) << places).sum(0)


def _check(tiles: RecordTiles, byte: Tensor, mask: Tensor, turned: Tensor, owner: Tensor) -> None:
    """Raise `AatcError` where the table gives other tiles for random bytes than the packing does."""
    widths = _widths(tiles)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(256, (4, *widths.shape), generator=generator).to(widths.device)
    held = drawn & ((1 << widths) - 1)
    left = held[:, owner, byte] & mask
    for shift in (4, 2, 1):
        left = left ^ (left >> shift)
    if not torch.equal((left & 1).to(torch.bool) ^ turned, packed_bits(tiles, held)):
        raise AatcError("the bits of these tiles are not those of single codes", "use --cache packed")
