"""Time of one layer's decode attention under CUDA graphs: fused, and the best of torch's kernels on a float16 cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aatc_cli.config import Geometry, Window
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.synthetic import random_tiles, synthetic_tables
from aatc_cli.runtime.captured import captured
from aatc_cli.runtime.fused.reference import decode_attention
from aatc_cli.runtime.kernels.angles import slot_angles, tile_angles
from aatc_cli.runtime.kernels.decode import DecodeCall, Decoder, DecodeShape, Tuning, Turns
from aatc_cli.runtime.kernels.launch import on_hopper
from aatc_cli.runtime.kernels.tables import LayerTables, fast_pairs

# caches are cycled through so that together they are several times what the last-level cache holds
_COLD_BYTES = 400_000_000
_MOST_COPIES = 64
# float16 rotation and the slopes of slow pairs against float64, relative root mean square of the output
CHECK_BOUND = 0.03


@dataclass(frozen=True)
class Timing:
    """Seconds per call of every repeat, and the cache bytes one call reads."""

    backend: str
    seconds: list[float]
    bytes_moved: int


def graph_seconds(call: Callable[[], int], repeats: int) -> list[float]:
    """Seconds per unit of work of ``call``, which returns how many it did; captured once, then replayed."""
    counts: list[int] = []
    graph = captured(lambda: counts.append(call()), torch.device("cuda", torch.cuda.current_device()))
    count = counts[-1]
    found = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / count)
    # the first replays still find things cold that belong to no call
    return found[2:]


def copies_of(size: int) -> int:
    """How many caches of ``size`` bytes are cycled through."""
    return max(1, min(_MOST_COPIES, _COLD_BYTES // size + 1))


def sdpa_timings(geometry: Geometry, batch: int, context: int, repeats: int, device: torch.device) -> list[Timing]:
    """torch's attention on a bfloat16 cache in place: flash and cuDNN, queries of a kv head packed as rows or not."""
    size = batch * context * geometry.channels * 4
    shape = (batch, geometry.kv_heads, context, geometry.head_dim)
    caches = [
        tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)) for _ in range(copies_of(size))
    ]
    query = torch.randn(batch, geometry.heads, 1, geometry.head_dim, device=device, dtype=torch.bfloat16)
    rows = query.view(batch, geometry.kv_heads, -1, geometry.head_dim)
    found = []
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        for form, given, grouped in (("packed", rows, False), ("grouped", query, True)):

            def call(given: Tensor = given, backend: SDPBackend = backend, grouped: bool = grouped) -> int:
                with sdpa_kernel(backend):
                    for keys, values in caches:
                        F.scaled_dot_product_attention(given, keys, values, enable_gqa=grouped)
                return len(caches)

            try:
                found.append(Timing(f"sdpa-{name}-{form}", graph_seconds(call, repeats), size))
            except RuntimeError:
                continue  # this build of torch has no such kernel for this shape
    if not found:
        raise AatcError("torch has no flash or cuDNN attention here", "install a CUDA build of torch")
    return found


@dataclass(frozen=True)
class FusedInputs:
    """What one call reads: caches uint8 [B, tiles, tile_bytes] that are cycled through, exact rows, a query [B, Hq, D].

    counters int32 [B]: cached tokens, packed tiles, first visible token.
    """

    caches: list[Tensor]
    rows: tuple[Tensor, Tensor]
    query: Tensor
    counters: tuple[Tensor, Tensor, Tensor]
    slot_angles: Tensor
    tile_angles: Tensor


@dataclass
class FusedBench:
    """One layer's fused attention over random tiles."""

    geometry: Geometry
    window: Window
    tables: LayerTables
    frequencies: Tensor
    batch: int
    context: int

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        window: Window,
        bits: float,
        theta: float,
        batch: int,
        context: int,
        device: torch.device,
    ) -> FusedBench:
        """Of a geometry at a mean width; ``theta`` is the base of its rotary frequencies."""
        steps = torch.arange(0, geometry.head_dim, 2, device=device, dtype=torch.float64) / geometry.head_dim
        frequencies = theta**-steps
        tables = synthetic_tables(geometry, bits, fast_pairs(frequencies), device, hopper=on_hopper(device))
        return cls(geometry, window, tables, frequencies, batch, context)

    @property
    def tiles(self) -> int:
        """Packed tiles of a sequence."""
        return packed_tokens(self.context, self.window) // TILE

    def decoder(self, tuning: Tuning | None = None) -> Decoder:
        """The compiled kernels of this shape."""
        g, tables = self.geometry, self.tables
        head = int((tables.offsets[1:] - tables.offsets[:-1]).max())
        shape = DecodeShape(
            self.batch,
            g.kv_heads,
            g.heads // g.kv_heads,
            g.head_dim,
            self.window.sinks + self.window.recent,
            self.window.sinks,
            max(self.tiles, 1),
            tables.tile_bytes,
            head,
            tables.fast,
            tables.key.halves,
            tables.key.steps,
            tables.key.kinds,
            g.head_dim**-0.5,
        )
        return Decoder(shape, torch.bfloat16, tables.decode.device, tuning)

    def measure(self, repeats: int, tuning: Tuning | None = None) -> tuple[Timing, float]:
        """Times of a call, and the relative error of the first sequence's output to the float64 twin."""
        decoder, given = self.decoder(tuning), self._inputs()
        places, single = self.tables.token_angles(self.frequencies), self.frequencies.to(torch.float32)
        turns = Turns(single, given.tile_angles, places, given.slot_angles)
        out = torch.empty_like(given.query)

        def call() -> int:
            for data in given.caches:
                decoder(DecodeCall(given.query, data, self.tables, turns, given.rows, given.counters), out)
            return len(given.caches)

        call()
        expected = self._expected(given)
        error = float((out[:1] - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        moved = self.batch * self.tiles * self.tables.tile_bytes + sum(part.nbytes for part in given.rows)
        return Timing("fused", graph_seconds(call, repeats), moved), error

    def _inputs(self) -> FusedInputs:
        """Random tiles, exact rows and a query from seed 0, and the counters and angles of a full cache."""
        device, window, tables = self.tables.decode.device, self.window, self.tables
        generator = torch.Generator(device).manual_seed(0)
        most, size = max(self.tiles, 1), self.batch * self.tiles * tables.tile_bytes
        caches = [random_tiles(self.batch, most, tables, generator) for _ in range(copies_of(max(size, 1)))]

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, device=device, dtype=torch.bfloat16, generator=generator)

        slots = window.sinks + window.recent
        rows = normal(slots, self.geometry.channels), normal(slots, self.geometry.channels)
        query = normal(self.geometry.heads, self.geometry.head_dim)
        tokens, tiles, hidden = (
            torch.full((self.batch,), value, dtype=torch.int32, device=device)
            for value in (self.context, self.tiles, 0)
        )
        index = torch.arange(window.sinks + TILE * self.tiles, self.context, device=device)
        positions = torch.arange(slots, device=device)
        positions[window.sinks + (index - window.sinks) % window.recent] = index
        angles = slot_angles(self.frequencies, positions), tile_angles(self.frequencies, window.sinks, most)
        return FusedInputs(caches, rows, query, (tokens, tiles, hidden), *angles)

    def _expected(self, given: FusedInputs) -> Tensor:
        """What the twin gives for the first sequence of the last cache."""
        return decode_attention(
            given.query[:1],
            given.caches[-1][:1],
            self.tables.held(),
            self.frequencies,
            (given.rows[0][:1], given.rows[1][:1]),
            (given.counters[0][:1], given.counters[1][:1], given.counters[2][:1]),
            sinks=self.window.sinks,
            scaling=self.geometry.head_dim**-0.5,
        )
