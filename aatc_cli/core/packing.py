"""Integer codes as bytes and back, at widths 0 to 16 per channel; `core.layout` says how many bytes that is.

A width is a sum of the power-of-two planes 16, 8, 4, 2, 1, and a code is cut into them from its highest bits down:
width 6 is a 4-bit field above a 2-bit field. Channels with bits are sorted widest first, so every width is one run of
channels and every plane a dense rectangle over a few such runs; no code straddles a byte, nothing is masked. Channels
without bits are not there at all. Keys are packed along channels, one row per token; values along the tokens of a
flush block, one run of bytes per channel.

Unpacking turns the bytes round first, so that tokens are neighbours, and then works on words of four of them: a field
is moved to the top of its byte, where codes of every width up to 8 are signed bytes times the same power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.layout import PLANES

# tokens that are unpacked as one word
_WORD = 4


@dataclass(frozen=True)
class WidthClass:
    """A run of sorted channels of one width: ``start`` .. ``stop`` in `PackPlan.order`."""

    width: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackPlan:
    """How one site's codes become bytes. order [A]: the A channels with bits, widest first, ties by channel number.

    ``row_bytes`` is the size of a token's packed key, ``block_bytes`` that of a packed value block of ``flush`` tokens.
    """

    order: Tensor
    classes: tuple[WidthClass, ...]
    flush: int
    row_bytes: int
    block_bytes: int

    def members(self, plane: int) -> list[WidthClass]:
        """The width classes that have ``plane`` in their width, in sorted order."""
        return [run for run in self.classes if run.width & plane]

    def count(self, plane: int) -> int:
        """Channels that have ``plane`` in their width."""
        return sum(run.stop - run.start for run in self.members(plane))

    @cached_property
    def wide(self) -> int:
        """Channels of more than 8 bits, which come first."""
        return max((run.stop for run in self.classes if run.width > 8), default=0)

    @cached_property
    def widths(self) -> Tensor:
        """Widths of the sorted channels, int32 [A]."""
        counts = [run.stop - run.start for run in self.classes]
        widths = torch.tensor([run.width for run in self.classes], dtype=torch.int32)
        return widths.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(self.order.device)

    @cached_property
    def _key_sections(self) -> list[_Section]:
        return _sections(self, "k")

    @cached_property
    def _value_sections(self) -> list[_Section]:
        return _sections(self, "v")


def pack_plan(bits: Sequence[int], flush: int, device: torch.device | str = "cpu") -> PackPlan:
    """The packing of a site with these widths [C] and ``flush`` tokens per value block; ``order`` is on ``device``."""
    order = sorted((channel for channel, width in enumerate(bits) if width), key=lambda c: (-bits[c], c))
    classes: list[WidthClass] = []
    for width in sorted(set(bits) - {0}, reverse=True):
        start = classes[-1].stop if classes else 0
        classes.append(WidthClass(width, start, start + sum(1 for b in bits if b == width)))
    plan = PackPlan(torch.tensor(order, dtype=torch.int64, device=device), tuple(classes), flush, 0, 0)
    rows = sum(_field_bytes(plan.count(plane), plane) for plane in PLANES)
    blocks = sum(plan.count(plane) * _field_bytes(flush, plane) for plane in PLANES)
    return PackPlan(plan.order, plan.classes, flush, rows, blocks)


def pack_keys(codes: Tensor, plan: PackPlan) -> Tensor:
    """Codes [..., C] (int32, signed as `core.quantizer` makes them) as bytes along channels: uint8 [..., row_bytes]."""
    fields = _split(codes, plan)
    parts = [_pack_fields(torch.cat(fields[plane], -1), plane) for plane in PLANES if fields[plane]]
    return torch.cat(parts, -1) if parts else codes.new_empty((*codes.shape[:-1], 0), dtype=torch.uint8)


def unpack_keys(data: Tensor, plan: PackPlan, dtype: torch.dtype = torch.int32) -> Tensor:
    """Inverse of `pack_keys`: signed codes of the channels with bits, in sorted order. [..., row_bytes] -> [..., A]."""
    rows = data.flatten(0, -2)
    codes = _whole_codes(unpack_aligned(rows[None], plan, "k"), plan)[:, 0, : rows.shape[0]]
    return codes.T.reshape(*data.shape[:-1], -1 if codes.numel() else codes.shape[0]).to(dtype)


def pack_values(codes: Tensor, plan: PackPlan) -> Tensor:
    """Codes of whole blocks [..., f, C] as bytes along tokens, channel after channel: uint8 [..., block_bytes]."""
    fields = _split(codes, plan)
    parts = [
        _pack_fields(torch.cat(fields[plane], -1).transpose(-1, -2), plane).flatten(-2)
        for plane in PLANES
        if fields[plane]
    ]
    return torch.cat(parts, -1) if parts else codes.new_empty((*codes.shape[:-2], 0), dtype=torch.uint8)


def unpack_values(data: Tensor, plan: PackPlan, dtype: torch.dtype = torch.int32) -> Tensor:
    """Inverse of `pack_values`, with channels before tokens: [..., block_bytes] -> [..., A, f]."""
    blocks = data.flatten(0, -2)
    codes = _whole_codes(unpack_aligned(blocks[None], plan, "v"), plan)[..., : blocks.shape[0]]
    return codes.permute(2, 0, 1).reshape(*data.shape[:-1], *codes.shape[:2]).to(dtype)


def unpack_aligned(data: Tensor, plan: PackPlan, side: Side) -> tuple[Tensor, Tensor]:
    """Codes as bytes in which every width has its highest bit on top, tokens last: the form that decoding reads.

    data: packed keys [b, n, row_bytes], then f' = 1, or packed values [b, n, block_bytes], then f' = f tokens of n
    blocks. -> high int8 [b, A, f', m] and low uint8 [b, W, f', m], W being `PackPlan.wide`: a code of b bits is
    (high + low / 256) 2^(b - 8). m is n made a multiple of 4; what is beyond n belongs to no token.
    """
    columns, batch, active = _turned(data), data.shape[0], int(plan.order.shape[0])
    run = 1 if side == "k" else plan.flush
    shape = (batch, active + plan.wide, run, columns.shape[2])
    out = torch.empty(shape, dtype=torch.uint8, device=data.device)
    words, turned = out.view(torch.int32), columns.view(torch.int32)
    for section in plan._key_sections if side == "k" else plan._value_sections:
        count, bytes_ = section.count, slice(section.start, section.stop)
        if section.plane == 16:
            pairs = torch.unflatten(columns[:, bytes_], 1, (count, run, 2))
            out[:, :count], out[:, active : active + count] = pairs[:, :, :, 1], pairs[:, :, :, 0]
        elif side == "k":
            _place(_fields(turned[:, None, bytes_], section, count).transpose(1, 2), section, words)
        else:
            _place(_fields(torch.unflatten(turned[:, bytes_], 1, (count, -1)), section, run), section, words)
    # codes are stored with half their range added, which is their highest bit turned over
    words[:, :active] ^= _repeated(0x80)
    return out[:, :active].view(torch.int8), out[:, active:]


def _field_bytes(count: int, plane: int) -> int:
    return math.ceil(count * plane / 8)


def _split(codes: Tensor, plan: PackPlan) -> dict[int, list[Tensor]]:
    """Unsigned fields of every plane, one tensor per width class, channels on the last axis."""
    ordered = codes.index_select(-1, plan.order)
    fields: dict[int, list[Tensor]] = {plane: [] for plane in PLANES}
    for run in plan.classes:
        unsigned = ordered[..., run.start : run.stop] + (1 << (run.width - 1))
        for plane in PLANES:
            if run.width & plane:
                fields[plane].append((unsigned >> _shift(run.width, plane)) & ((1 << plane) - 1))
    return fields


@dataclass(frozen=True)
class _Section:
    """The bytes ``start`` .. ``stop`` of one plane of ``count`` channels, and where their fields go.

    places: shifts of the fields that share a byte. Up by ``shift`` [n, 1, 1] bits, then in runs (source, target, count,
    first): targets count the sorted channels, and behind them the low bytes of wide ones; first: nothing was put into
    those bytes before.
    """

    plane: int
    start: int
    stop: int
    count: int
    places: Tensor
    shift: Tensor
    runs: tuple[tuple[int, int, int, bool], ...]


def _sections(plan: PackPlan, side: Side) -> list[_Section]:
    """Sections of the bytes of a key row or a value block, in their order."""
    found: list[_Section] = []
    start, device = 0, plan.order.device
    for plane in PLANES:
        count = plan.count(plane)
        if count:
            size = _field_bytes(count, plane) if side == "k" else count * _field_bytes(plan.flush, plane)
            places = torch.arange(0, 8, plane, dtype=torch.int32, device=device)[:, None, None]
            shifts, runs = _moves(plan, plane)
            shift = torch.tensor(shifts, dtype=torch.int32, device=device)[:, None, None]
            found.append(_Section(plane, start, start + size, count, places, shift, runs))
            start += size
    return found


def _moves(plan: PackPlan, plane: int) -> tuple[list[int], tuple[tuple[int, int, int, bool], ...]]:
    """Shift and runs of a plane, as `_Section` has them."""
    shifts: list[int] = []
    runs: list[tuple[int, int, int, bool]] = []
    for run in plan.members(plane):
        low = run.width > 8 and plane < 8
        used = (run.width & 7 if low else run.width) & ~(2 * plane - 1)
        target, count = run.start + (int(plan.order.shape[0]) if low else 0), run.stop - run.start
        source, first = len(shifts), used == 0
        shifts += [8 - plane - used] * count
        if runs and runs[-1][3] == first and runs[-1][1] + runs[-1][2] == target:
            source, target, count = runs[-1][0], runs[-1][1], runs[-1][2] + count
            runs.pop()
        runs.append((source, target, count, first))
    return shifts, tuple(runs)


def _turned(data: Tensor) -> Tensor:
    """Bytes [b, n, m] with the n tokens or blocks last, made a multiple of a word: [b, m, n']."""
    batch, count, size = data.shape
    padding = -count % _WORD
    make = data.new_zeros if padding else data.new_empty
    out = make(batch, size, count + padding)
    out[..., :count].copy_(data.transpose(1, 2))
    return out


def _fields(words: Tensor, section: _Section, count: int) -> Tensor:
    """Words [b, r, m, n / 4] of r runs as ``count`` fields each: int32 [b, r, count, n / 4]."""
    if section.plane == 8:
        return words
    fields = (words[:, :, None] >> section.places).bitwise_and_(_repeated((1 << section.plane) - 1))
    return fields.flatten(2, 3)[:, :, :count]


def _place(fields: Tensor, section: _Section, words: Tensor) -> None:
    """Put fields [b, n, f', n / 4] into the words of their channels."""
    if section.plane < 8:
        fields.bitwise_left_shift_(section.shift)
    for source, target, count, first in section.runs:
        part, goal = fields[:, source : source + count], words[:, target : target + count]
        if first:
            goal.copy_(part)
        else:
            goal.bitwise_or_(part)


def _repeated(byte: int) -> int:
    """A signed 32-bit number with ``byte`` in each of its bytes."""
    number = byte * 0x01010101
    return number - (1 << 32) if number >= 1 << 31 else number


def _whole_codes(aligned: tuple[Tensor, Tensor], plan: PackPlan) -> Tensor:
    """Signed codes int32 [A, f', n] of `unpack_aligned` for a batch of one."""
    high, low = (part[0] for part in aligned)
    codes = high.to(torch.int32) * 256
    codes[: plan.wide] += low
    return codes >> (16 - plan.widths)[:, None, None]


def _shift(width: int, plane: int) -> int:
    """Bits of a code below its field of ``plane``: what is left of the width in smaller planes."""
    return width & (plane - 1)


def _pack_fields(values: Tensor, plane: int) -> Tensor:
    """Fields [..., n] as bytes: with m bytes, entry i is in byte i mod m at bit plane * (i div m). 16: little endian.

    Entries of one field position are thus neighbours, and a field is read as one slice with one shift.
    """
    if plane == 16:
        return torch.stack((values & 255, values >> 8), -1).flatten(-2).to(torch.uint8)
    size = _field_bytes(values.shape[-1], plane)
    padded = torch.nn.functional.pad(values, (0, size * (8 // plane) - values.shape[-1]))
    data = padded[..., :size].clone()
    for place in range(1, 8 // plane):
        data |= padded[..., place * size : (place + 1) * size] << (plane * place)
    return data.to(torch.uint8)
