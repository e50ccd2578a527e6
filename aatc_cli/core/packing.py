"""Integer codes as bytes and back, at widths 0 to 16 per channel; `core.layout` says how many bytes that is.

A width is a sum of the power-of-two planes 16, 8, 4, 2, 1, and a code is cut into them from its highest bits down:
width 6 is a 4-bit field above a 2-bit field. Channels with bits are sorted widest first, so every width is one run of
channels and every plane a dense rectangle over a few such runs; no code straddles a byte, nothing is masked. Channels
without bits are not there at all. Keys are packed along channels, one row per token; values along the tokens of a
flush block, one run of bytes per channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.layout import PLANES


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
    planes: dict[int, Tensor] = {}
    start = 0
    for plane in PLANES:
        count = plan.count(plane)
        size = _field_bytes(count, plane)
        planes[plane] = _unpack_fields(data[..., start : start + size], plane, count)
        start += size
    return _join(planes, plan, -1, data, dtype)


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
    planes: dict[int, Tensor] = {}
    start = 0
    for plane in PLANES:
        count, run = plan.count(plane), _field_bytes(plan.flush, plane)
        runs = torch.unflatten(data[..., start : start + count * run], -1, (count, run))
        planes[plane] = _unpack_fields(runs, plane, plan.flush)
        start += count * run
    return _join(planes, plan, -2, data, dtype)


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


def _join(planes: dict[int, Tensor], plan: PackPlan, axis: int, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Signed codes from the unpacked planes, whose channels lie along ``axis``."""
    used = dict.fromkeys(PLANES, 0)
    parts = []
    for run in plan.classes:
        count = run.stop - run.start
        total: Tensor | None = None
        for plane in PLANES:
            if run.width & plane:
                # eight bits and fewer are put together as bytes, which is several times faster than as integers
                field = planes[plane].narrow(axis, used[plane], count)
                field = (field if run.width <= 8 else field.to(torch.int32)) << _shift(run.width, plane)
                total = field if total is None else total | field
                used[plane] += count
        assert total is not None
        parts.append(total.to(dtype) - (1 << (run.width - 1)))
    if parts:
        return torch.cat(parts, axis)
    shape = (*data.shape[:-1], 0) if axis == -1 else (*data.shape[:-1], 0, plan.flush)
    return data.new_empty(shape, dtype=dtype)


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


def _unpack_fields(data: Tensor, plane: int, count: int) -> Tensor:
    """Inverse of `_pack_fields`: [..., m] bytes to [..., count] fields, uint8 or (for 16 bits) int32."""
    if plane == 16:
        pairs = torch.unflatten(data, -1, (count, 2)).to(torch.int32)
        return pairs[..., 0] | (pairs[..., 1] << 8)
    if plane == 8:
        return data
    mask = (1 << plane) - 1
    return torch.cat([(data >> (plane * place)) & mask for place in range(8 // plane)], -1)[..., :count]
