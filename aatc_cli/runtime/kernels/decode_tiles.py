"""Launch of the decode attention over tiles with classes: one query per sequence over sinks, tiles and window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.angles import TileTurns
from aatc_cli.runtime.kernels.launch import ELEMENTS, function, launch

_LOG2E = 1.4426950408889634
# shared memory of a multiprocessor that programs may have together, a little less than there is
_SHARED = 226_000
_SHARED_OF_PROGRAM = 232_000
# programs of a head of one sequence: their parts are merged by one of them
_MOST_PARTS = 1024


@dataclass(frozen=True)
class TileShape:
    """What a launch is made for; lengths on the device may be anything up to ``max_tiles``.

    group: query heads of a kv head; classes of a kv head; lags: first and last distance of queries that count for what
    tokens receive; steps of keys and values, bytes of levels and of a class's records in a tile as of the tables.
    """

    batch: int
    kv_heads: int
    group: int
    classes: int
    dim: int
    slots: int
    sinks: int
    max_tiles: int
    tile_bytes: int
    key_steps: int
    value_steps: int
    level_bytes: int
    stage_bytes: int
    biased: bool
    lags: tuple[int, int]
    scaling: float

    @property
    def warps(self) -> int:
        """Warps of a program: eight share its tables where shared memory allows, four of them multiply together."""
        return 8 if self._walk_bytes(8, 2) <= _SHARED else 4

    @property
    def places(self) -> int:
        """Tiles of a warp that there is shared memory for: the next one comes while one is read, if there are two."""
        return 2 if self._walk_bytes(self.warps, 2) <= _SHARED else 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor is to hold at once, for which registers are shared out."""
        heads, lots = -(-self.group // 8), self.dim // 16
        # sums of keys, their codes, sums of values, queries, and what else there is
        registers = 4 * (lots + self.key_steps + heads * self.value_steps) + 2 * heads * lots + 32
        wanted = 3 if registers <= 104 else 2 if registers <= 160 else 1
        return max(1, min(wanted, _SHARED // self._walk_bytes(self.warps, self.places)))

    def chunk(self, processors: int) -> int:
        """Tiles of a program: few enough that programs fill the device some times over, at least two rounds."""
        heads = self.batch * self.kv_heads * self.classes
        wanted = max(1, -(-4 * processors * self.programs // heads))
        least = -(-self.max_tiles * self.classes // (_MOST_PARTS - self.exact))
        each = max(-(-self.max_tiles // wanted), 2 * self.warps, least)
        return -(-each // self.warps) * self.warps

    @property
    def exact(self) -> int:
        """Programs of a head's sinks and window: several where few sequences leave the device idle."""
        return 4 if self.batch * self.kv_heads < 64 else 1

    def shared_bytes(self, parts: int) -> int:
        """Shared bytes of a program, as the kernel lays them out, with ``parts`` programs of a head."""
        heads, walk = -(-self.group // 8), self._walk_bytes(self.warps, self.places)
        merge = self.warps * (self.group * self.dim + heads * 16) * 4
        wide = 2 * self.threads // self.dim
        exact = ((1 + wide) * self.dim + self.slots) * self.group * 4
        last = ((2 + wide) * self.dim + 3 + parts) * self.group * 4
        return max(walk, merge, exact, last)

    def _walk_bytes(self, warps: int, places: int) -> int:
        """Shared bytes of a program that walks tiles."""
        heads, lots = -(-self.group // 8), self.dim // 16
        walk = self.key_steps * (self.dim * 32 + 64 + 256) + 64 * (lots * 4 + 1) * 8 + heads * lots * 256
        walk += self.value_steps * (128 + 256) + self.level_bytes + self.dim * 2 + (2 * warps + 2) * 8
        return walk + places * warps * (self.stage_bytes + lots * 32)

    def defines(self, element: int) -> tuple[tuple[str, int], ...]:
        """What the kernel is compiled with for tensors of this element type."""
        return (
            ("D", self.dim),
            ("G", self.group),
            ("NW", self.warps),
            ("PLACES", self.places),
            ("KS", self.key_steps),
            ("VS", self.value_steps),
            ("QTYPE", element),
            ("BIAS", int(self.biased)),
            ("CTAS", self.programs),
        )

    def numbers(self, chunk: int) -> tuple[Any, ...]:
        """The scalars that come first in the kernel's signature."""
        whole = (
            self.kv_heads,
            self.classes,
            chunk,
            self.exact,
            self.slots,
            self.sinks,
            self.slots - self.sinks,
            self.tile_bytes,
            self.max_tiles,
            self.level_bytes,
            self.stage_bytes,
            *self.lags,
        )
        return *(np.int32(value) for value in whole), np.float32(self.scaling * _LOG2E)

    def parts(self, chunk: int) -> int:
        """Programs of a head of one sequence."""
        return self.exact + self.classes * -(-self.max_tiles // chunk)


@dataclass(frozen=True)
class TileScratch:
    """Buffers of a launch that are made once: partial results, arrivals, and the scores of exact tokens."""

    arrivals: Tensor
    part: Tensor
    stat: Tensor
    scores: Tensor

    @classmethod
    def of(cls, shape: TileShape, parts: int, device: torch.device) -> TileScratch:
        """For ``parts`` programs of a head."""
        heads = shape.batch * shape.kv_heads
        rows = heads * parts * shape.group
        return cls(
            torch.zeros(heads, dtype=torch.int32, device=device),
            torch.empty(rows, shape.dim, device=device),
            torch.empty(rows, 2, device=device),
            torch.empty(heads * shape.slots, shape.group, device=device),
        )


@dataclass(frozen=True)
class TileCounters:
    """Of every sequence: int32 [B] cached tokens and tiles, and [B, max_tiles] the place of every tile in the pool."""

    tokens: Tensor
    tiles: Tensor
    pages: Tensor


@dataclass(frozen=True)
class TileCall:
    """What a call is given: rotated queries [B, Hq, D], a pool uint8 [pages, tile_bytes], and what is known of both.

    tables: of the layer (`fused_tiles.tables.TileTables`); rows: exact keys before RoPE and values [B, slots, H D];
    received float32 [B, H, slots] is added to. Dimensions of queries and keys lie as pairs (i, i + D / 2).
    """

    query: Tensor
    pool: Tensor
    tables: Any
    turns: TileTurns
    rows: tuple[Tensor, Tensor]
    counters: TileCounters
    received: Tensor

    def arguments(self, scratch: TileScratch, out: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a launch in the order of the kernel's signature."""
        t, turns = self.tables, self.turns
        wide, lanes = (t.key_descriptors, t.value_descriptors), (t.key_lanes, t.value_lanes)
        static = t.classes, *wide, *lanes, t.levels, t.matrices, t.channels, t.pair_scale
        angles = turns.place_turns, turns.start_turns, turns.start_angles, turns.place_angles
        lengths = self.counters.tokens, self.counters.tiles
        buffers = scratch.arrivals, scratch.part, scratch.stat, scratch.scores
        return (
            *(self.query, self.pool, self.counters.pages, *static, t.key_bias, *angles, *self.rows, *lengths),
            *(t.decode, t.value_bias, *buffers, self.received, out),
        )


class TileDecoder:
    """Decode attention of layers of one shape; buffers are reused from call to call."""

    def __init__(self, shape: TileShape, dtype: torch.dtype, device: torch.device, chunk: int | None = None) -> None:
        self.shape, place = shape, device.index or 0
        self._kernel = function("tiles_sm90.cu", "attend_tiles", shape.defines(ELEMENTS[dtype]), place)
        self.chunk = chunk or shape.chunk(torch.cuda.get_device_properties(device).multi_processor_count)
        self.parts = shape.parts(self.chunk)
        self.scratch = TileScratch.of(shape, self.parts, device)
        self.shared = shape.shared_bytes(self.parts)
        if self.shared > _SHARED_OF_PROGRAM:
            problem = (
                f"the kernel of tiles has no shared memory for records of {shape.stage_bytes} bytes a tile and head"
            )
            raise AatcError(problem, "use --cache packed, or plan with fewer bits")
        # layers whose tables differ in size share the compiled function, and with it this limit
        self._kernel.max_dynamic_shared_size_bytes = _SHARED_OF_PROGRAM
        self._numbers = shape.numbers(self.chunk)

    def __call__(self, call: TileCall, out: Tensor) -> Tensor:
        """Attention of one rotated query per sequence -> ``out`` [B, Hq, D]."""
        s = self.shape
        tensors = call.arguments(self.scratch, out)
        launch(self._kernel, (s.batch, s.kv_heads, self.parts), s.threads, self._numbers, tensors, self.shared)
        return out
