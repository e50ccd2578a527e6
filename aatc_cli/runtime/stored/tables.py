"""Where the digits of a tile lie, as tables of numbers: what kernels decode by, on a CPU and on a GPU.

A *part* is one class and head group of a side; an *entry* one of its channels that has bits; a *slot* one digit of an
entry. Latents of an entry are looked up: ``levels`` holds what each of its codes is read as, before the token scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from aatc_cli.core import Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.scales import scale_grid
from aatc_cli.core.tile_bytes import DIGITS
from aatc_cli.core.tile_packing import SidePacking, TilePacking
from aatc_cli.core.tile_rule import class_bits
from aatc_cli.errors import AatcError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# wider codes have too many levels for a table
_WIDEST = 8


@dataclass(frozen=True)
class SideTables:
    """Tables of one side of one layer.

    parts [classes, groups, 3]: first entry, entries, and byte of the tile at which the scales lie.
    entries [n, 4]: channel in its group, first slot, slots, first level. slots [m, 4]: byte of the tile of the first
    token's word, bit in the word, place of the digit in the code, bits of the digit (2 in words of four bytes, 1 in
    words of two). levels [s]; basis [n, E]: what one of an entry is in model channels; scales: what
    every code of a scale is worth; bias [C], or empty.
    quotas: tokens of every class. orders, class_bits: of the classes at the head of a tile; nbytes: of a whole tile.
    """

    parts: Ints
    entries: Ints
    slots: Ints
    levels: Floats
    basis: Floats
    scales: Floats
    scale_bits: int
    bias: Floats
    quotas: Ints
    orders: int
    class_bits: int
    class_stride: int
    nbytes: int

    @property
    def groups(self) -> int:
        """Head groups."""
        return int(self.parts.shape[1])

    @property
    def size(self) -> int:
        """Channels of a head group (E)."""
        return int(self.basis.shape[1])


def side_tables(packing: TilePacking, side: Side, bias: torch.Tensor | None) -> SideTables:
    """The tables of one side; raises `AatcError` for a code of more than 8 bits, which has none."""
    mine = packing.sides[side]
    if int(mine.codec.bits.max()) > _WIDEST:
        raise AatcError(f"codes of more than {_WIDEST} bits have no tables", "decode them by the code itself")
    start = packing.header + (0 if side == "k" else packing.sides["k"].nbytes)
    parts, entries, slots, levels = _walk(mine, start)
    rule, codec = packing.rule, mine.codec.codec
    bias = codec.offset(bias)
    orders = rule.orders(packing.heads)
    return SideTables(
        parts,
        np.array(entries, dtype=np.int64).reshape(-1, 4),
        np.array(slots, dtype=np.int64).reshape(-1, 4),
        np.concatenate(levels) if levels else np.zeros(0, dtype=np.float32),
        _basis(codec, parts, entries),
        scale_values(codec.scale_bits),
        codec.scale_bits,
        np.zeros(0, dtype=np.float32) if bias is None else bias.cpu().to(torch.float32).numpy(),
        np.array(rule.quotas, dtype=np.int64),
        orders,
        class_bits(rule.classes),
        packing.header // orders,
        packing.nbytes,
    )


def _walk(mine: SidePacking, start: int) -> tuple[Ints, list[list[int]], list[list[int]], list[Floats]]:
    """Parts, entries, slots and levels of a side that begins at byte ``start`` of a tile."""
    groups, size = mine.codec.codec.groups, mine.size
    parts = np.zeros((mine.rule.classes, groups, 3), dtype=np.int64)
    entries: list[list[int]] = []
    slots: list[list[int]] = []
    levels: list[Floats] = []
    for k, (quantizer, found) in enumerate(zip(mine.quantizers, mine.classes, strict=True)):
        tables = _levels(quantizer)
        for part in found:
            place, held = start + part.start, dict[int, list[list[int]]]()
            for digits in part.digits:
                word = digits.bits * DIGITS // 8
                for index, (channel, shift) in enumerate(
                    zip(digits.channel.tolist(), digits.shift.tolist(), strict=True)
                ):
                    at = place + index // DIGITS * word * part.count
                    held.setdefault(channel, []).append([at, digits.bits * (index % DIGITS), shift, digits.bits])
                place += digits.planes * part.count * word
            parts[k, part.group] = len(entries), len(held), place
            for channel in sorted(held):
                table = tables[part.group * size + channel]
                entries.append([channel, len(slots), len(held[channel]), sum(map(len, levels))])
                # a digit of one bit first: it is the lowest
                slots += sorted(held[channel], key=lambda slot: slot[2])
                levels.append(table)
    return parts, entries, slots, levels


def _basis(codec: TransformCodec, parts: Ints, entries: list[list[int]]) -> Floats:
    """The row of the decode matrix of every entry."""
    decode = codec.decode.cpu().to(torch.float32).numpy()
    basis = np.zeros((len(entries), decode.shape[1]), dtype=np.float32)
    for k, group in np.ndindex(*parts.shape[:2]):
        first, count = parts[k, group, :2]
        basis[first : first + count] = decode[group, [entry[0] for entry in entries[first : first + count]]]
    return basis


def _levels(codec: TransformCodec) -> list[Floats]:
    """What every code of every channel is read as at a token scale of one."""
    widest = int(codec.bits.max())
    half = (1 << codec.bits.to(torch.int64)) >> 1
    codes = torch.arange(2**widest, device=half.device)[:, None] - half
    signed = torch.where(codes < half.clamp_min(1), codes, torch.zeros_like(codes)).to(torch.int32)
    one = torch.ones(codes.shape[0], codec.groups, dtype=torch.float16, device=half.device)
    # a mean is no part of what scales are multiplied with: it is added as biases are
    read = replace(codec, centre=None).dequantize(signed, one).to(torch.float32).cpu().numpy()
    return [read[: 2**width, channel].copy() for channel, width in enumerate(codec.bits.tolist())]


def scale_values(bits: int) -> Floats:
    """What every code of a scale of so many bits is worth."""
    if bits == 16:
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return scale_grid(torch.device("cpu"), bits).to(torch.float32).numpy()
