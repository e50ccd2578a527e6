"""How the codes of a site lie in its bytes: runs of channels of one width, planes, and where their fields go.

A width is a sum of the power-of-two planes 16, 8, 4, 2, 1. Channels with bits are sorted widest first, so every width
is one run of channels and every plane a dense rectangle over a few such runs. `core.packing` packs and unpacks by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.site_widths import PLANES


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
    def key_sections(self) -> list[Section]:
        """Sections of a token's packed key."""
        return _sections(self, "k")

    @cached_property
    def value_sections(self) -> list[Section]:
        """Sections of a packed value block."""
        return _sections(self, "v")


def pack_plan(bits: Sequence[int], flush: int, device: torch.device | str = "cpu") -> PackPlan:
    """The packing of a site with these widths [C] and ``flush`` tokens per value block; ``order`` is on ``device``."""
    order = sorted((channel for channel, width in enumerate(bits) if width), key=lambda c: (-bits[c], c))
    classes: list[WidthClass] = []
    for width in sorted(set(bits) - {0}, reverse=True):
        start = classes[-1].stop if classes else 0
        classes.append(WidthClass(width, start, start + sum(1 for b in bits if b == width)))
    plan = PackPlan(torch.tensor(order, dtype=torch.int64, device=device), tuple(classes), flush, 0, 0)
    rows = sum(field_bytes(plan.count(plane), plane) for plane in PLANES)
    blocks = sum(plan.count(plane) * field_bytes(flush, plane) for plane in PLANES)
    return PackPlan(plan.order, plan.classes, flush, rows, blocks)


def field_bytes(count: int, plane: int) -> int:
    """Bytes of ``count`` fields of ``plane`` bits that are packed behind one another."""
    return math.ceil(count * plane / 8)


@dataclass(frozen=True)
class Section:
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


def _sections(plan: PackPlan, side: Side) -> list[Section]:
    """Sections of the bytes of a key row or a value block, in their order."""
    found: list[Section] = []
    start, device = 0, plan.order.device
    for plane in PLANES:
        count = plan.count(plane)
        if count:
            size = field_bytes(count, plane) if side == "k" else count * field_bytes(plan.flush, plane)
            places = torch.arange(0, 8, plane, dtype=torch.int32, device=device)[:, None, None]
            shifts, runs = _moves(plan, plane)
            shift = torch.tensor(shifts, dtype=torch.int32, device=device)[:, None, None]
            found.append(Section(plane, start, start + size, count, places, shift, runs))
            start += size
    return found


def _moves(plan: PackPlan, plane: int) -> tuple[list[int], tuple[tuple[int, int, int, bool], ...]]:
    """Shift and runs of a plane, as `Section` has them."""
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
