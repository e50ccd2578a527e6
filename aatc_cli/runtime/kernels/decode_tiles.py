"""Launch of the decode attention over tiles with classes: one query per sequence over sinks, tiles and window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.angles import TileTurns
from aatc_cli.runtime.kernels.launch import ELEMENTS, function, launch
from aatc_cli.runtime.kernels.tile_shape import SHARED_OF_PROGRAM, TileShape


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
        sizes = (rows, shape.dim), (rows, 2), (heads * shape.slots, shape.group)
        numbers = (torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
        return cls(torch.zeros(heads, dtype=torch.int32, device=device), *numbers)


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
        static = t.classes, t.matrices, t.digit_slots, t.digit_weights, t.offsets, t.pair_scale
        angles = turns.place_turns, turns.start_turns, turns.slopes, turns.start_angles, turns.place_angles
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
        if self.shared > SHARED_OF_PROGRAM:
            problem = (
                f"the kernel of tiles has no shared memory for records of {shape.stage_bytes} bytes a tile and head"
            )
            raise AatcError(problem, "use --cache packed, or plan with fewer bits")
        # layers whose tables differ in size share the compiled function, and with it this limit
        self._kernel.max_dynamic_shared_size_bytes = SHARED_OF_PROGRAM
        self._numbers = shape.numbers(self.chunk)

    def __call__(self, call: TileCall, out: Tensor) -> Tensor:
        """Attention of one rotated query per sequence -> ``out`` [B, Hq, D]."""
        s = self.shape
        tensors = call.arguments(self.scratch, out)
        launch(self._kernel, (s.batch, s.kv_heads, self.parts), s.threads, self._numbers, tensors, self.shared)
        return out
