"""Launch of the fused decode attention: one query per sequence over sinks, packed tiles and window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aatc_cli.runtime.kernels.launch import ELEMENTS, function, launch
from aatc_cli.runtime.kernels.tables import LayerTables

_LOG2E = 1.4426950408889634
# programs that may share a head of one sequence
_MOST_PARTS = 512


@dataclass(frozen=True)
class Tuning:
    """Launch shape: warps per program, row tiles of 16 tokens held at once, programs per multiprocessor.

    row_tiles is 1, 2 or 4, of decode.cu alone. The defaults are the fastest of those measured on an H200 at 128
    dimensions; docs/log/kernels.md has the figures. ``of`` picks them for the kernel that a shape runs on.
    """

    warps: int = 6
    row_tiles: int = 2
    programs: int = 2
    unroll: int = 2

    @classmethod
    def of(cls, shape: DecodeShape) -> Tuning:
        """The fastest measured for the kernel of this shape."""
        if not shape.steps:
            return cls()
        lots = -(-shape.group // 4)
        registers = 4 * (shape.dim // 16) * lots + 4 * (shape.steps + shape.fast + lots)
        return cls(warps=16 if registers <= 80 else 12 if registers <= 112 else 8, row_tiles=1, programs=1)

    def fitting(self, shape: DecodeShape, shared: int) -> Tuning:
        """The same, or smaller where a wide head or many bits do not leave that room in ``shared`` bytes."""
        found = self if shape.dim <= 128 else replace(self, warps=4, programs=1, unroll=1)
        # warps that multiply together come in fours
        least = 4 if shape.steps else 1
        while shape.shared_bytes(found) * found.programs > shared and found.warps > least:
            found = replace(found, warps=found.warps - least)
        return found


@dataclass(frozen=True)
class DecodeShape:
    """What a launch is made for; device-side lengths may be anything up to it."""

    batch: int
    kv_heads: int
    group: int
    dim: int
    slots: int
    sinks: int
    max_tiles: int
    tile_bytes: int
    head_bytes: int
    fast: int
    halves: int
    steps: int
    kinds: int
    scaling: float

    def splits(self, tuning: Tuning, processors: int) -> int:
        """Programs per head and sequence that fill the device once, at most one per ``warps`` tiles."""
        wanted = max(1, processors * tuning.programs // (self.batch * self.kv_heads))
        wanted = min(wanted, _MOST_PARTS // 2)
        return max(1, min(wanted, -(-self.max_tiles // (tuning.warps * (1 if self.steps else self.span)))))

    @property
    def span(self) -> int:
        """Tiles of a warp that share one absorbed query in decode.cu: two, or one where tiles are fewer than warps."""
        return 1 if self.batch * self.kv_heads * self.max_tiles < 4096 else 2

    def exact(self, splits: int, room: int) -> tuple[int, bool]:
        """Shares of a head's sinks and window, and whether programs that walk tiles take them: if ``room`` is full.

        Otherwise they are programs of their own, several where few sequences leave the device idle.
        """
        heads = self.batch * self.kv_heads
        own = 4 if heads < 64 else 1
        inside = self.steps > 0 and heads * (splits + own) > room
        return (splits, True) if inside else (own, False)

    @property
    def stage_bytes(self) -> int:
        """Shared bytes of one tile under way: the record, and where warps are on their own two sets of angles."""
        if self.steps:
            # planes that a head lacks are read too, as far as the most planes of two bits push them
            return max(self.head_bytes, 128 * (2 * self.steps - 1 + self.kinds.bit_length() - 1))
        slow = self.dim * 4 if self.fast < self.dim // 16 else 0
        return self.head_bytes + slow + max(self.dim * 4, -(-self.group // 4) * self.fast * 128)

    def shared_bytes(self, tuning: Tuning) -> int:
        """Shared bytes of a program, as the kernel lays them out."""
        warps, lots = tuning.warps, -(-self.group // 4)
        main = self._grouped_bytes(warps, lots) if self.steps else self._single_bytes(warps, lots)
        merge = warps * self.group * self.dim * 4 + warps * lots * 48
        # the last program of a head has the parts of at most all programs there can be
        last = self._pair_sums(warps) + (_MOST_PARTS + 2) * self.group * 4
        # barriers of Hopper, of every warp, every group and the tables, lie in front of all else
        barriers = -(-(2 * warps + warps // 4 + 1) * 8 // 128) * 128 if self.steps else 0
        return barriers + max(main, merge, self._exact_bytes(warps), last)

    def _grouped_bytes(self, warps: int, lots: int) -> int:
        """Of decode_sm90.cu: tables, what groups of four warps share, and a record for each warp."""
        slow, pairs = self.dim // 16 - self.fast, self.dim // 2
        fixed = self.fast * 16 * 256 + (self.dim // 16 + 1) * slow * 512 + self.steps * 32
        fixed += pairs * 4 + 8 * lots * (self.dim + 8) * 4
        group = 512 * self.steps * (self.fast + (lots if slow else 0)) + lots * 256 * (3 * self.fast + 2 * slow)
        held = max(warps * self.stage_bytes, self._exact_bytes(warps))
        return fixed + warps // 4 * group + held

    def _exact_bytes(self, warps: int) -> int:
        """Of sinks and window: queries, sums of groups of tokens, slots and scores."""
        return self._pair_sums(warps) + self.slots * (self.group + 1) * 4

    def _pair_sums(self, warps: int) -> int:
        """Of sums of threads that have two dimensions each, with room for two vectors per query beside them."""
        return (2 * warps * 32 // (self.dim // 2) + 2) * self.group * self.dim * 4

    def _single_bytes(self, warps: int, lots: int) -> int:
        """Of decode.cu: tables, and for each warp two stages and its absorbed queries."""
        steps = self.dim // 32
        fixed = self.fast * steps * 512 + 2 * steps * ((self.dim // 16 - self.fast) * 512 + 16) + self.dim * 2
        fixed += self.fast * (64 * 32 + 128) + 4 * lots * self.dim * 4
        return fixed + warps * (2 * self.stage_bytes + lots * (steps * 512 + 128))


class Turns(NamedTuple):
    """Angles of a launch: frequencies float32 [D / 2], and cos and sin of starts of tiles, places in a tile, and slots.

    starts: `angles.tile_angles`; places: `LayerTables.token_angles`; slots: `angles.slot_angles` of the exact tokens.
    """

    frequencies: Tensor
    starts: Tensor
    places: Tensor
    slots: Tensor


@dataclass(frozen=True)
class DecodeCall:
    """What a call is given: rotated queries [B, Hq, D] and a cache uint8 [B, max_tiles, tile_bytes] with its tables.

    rows: exact keys before RoPE and values [B, slots, H D]. counters int32 [B], on the device: cached tokens, packed
    tiles, and first visible token of every sequence.
    """

    query: Tensor
    data: Tensor
    tables: LayerTables
    turns: Turns
    rows: tuple[Tensor, Tensor]
    counters: tuple[Tensor, Tensor, Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of a launch in the order of the kernel's signature, up to what it writes."""
        t, turns = self.tables, self.turns
        held = self.query, self.data, t.widths, t.offsets, *t.key.arguments
        angles = turns.frequencies, turns.starts, turns.places
        return *held, *angles, *self.rows, turns.slots, *self.counters, t.decode, t.value_offset


class Decoder:
    """Fused decode attention of one layer shape; buffers for partial results are made once and reused."""

    def __init__(
        self, shape: DecodeShape, dtype: torch.dtype, device: torch.device, tuning: Tuning | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        properties = torch.cuda.get_device_properties(device)
        # a little is taken by the system for every program
        self.tuning = (tuning or Tuning.of(shape)).fitting(shape, properties.shared_memory_per_multiprocessor - 4096)
        place, tune = device.index or 0, self.tuning
        defines = (
            ("D", shape.dim),
            ("G", shape.group),
            ("JF", shape.fast),
            ("QTYPE", ELEMENTS[dtype]),
            ("NW", tune.warps),
            ("MT", tune.row_tiles),
            ("CTAS", tune.programs),
            ("JU", tune.unroll),
            ("PS", shape.steps),
            ("KINDS", shape.kinds),
        )
        source = "decode_sm90.cu" if shape.steps else "decode.cu"
        self._split = function(source, "decode_split", defines, place)
        self.splits = shape.splits(self.tuning, properties.multi_processor_count)
        self.shares, inside = shape.exact(self.splits, properties.multi_processor_count * self.tuning.programs)
        self.programs = self.splits + (0 if inside else self.shares)
        rows = shape.batch * shape.kv_heads * (self.splits + self.shares) * shape.group
        self.part = torch.empty(rows, shape.dim, dtype=torch.float32, device=device)
        self.stat = torch.empty(rows, 3, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(shape.batch * shape.kv_heads, dtype=torch.int32, device=device)
        self.shared = shape.shared_bytes(self.tuning)
        self._split.max_dynamic_shared_size_bytes = self.shared
        self._numbers = self._scalars()

    def __call__(self, call: DecodeCall, out: Tensor) -> Tensor:
        """Attention of one rotated query per sequence -> ``out`` [B, Hq, D]."""
        s = self.shape
        grid, threads = (s.batch, s.kv_heads, self.programs), self.tuning.warps * 32
        tensors = (*call.inputs, self.arrivals, self.part, self.stat, out)
        launch(self._split, grid, threads, self._numbers, tensors, self.shared)
        return out

    def _scalars(self) -> tuple[Any, ...]:
        s = self.shape
        whole = (
            s.kv_heads,
            self.splits,
            self.shares,
            s.span,
            s.slots,
            s.sinks,
            s.slots - s.sinks,
            s.tile_bytes,
            s.max_tiles,
            s.stage_bytes,
            s.halves,
        )
        return *(np.int32(value) for value in whole), np.float32(s.scaling * _LOG2E)
