"""Time of one layer's decode attention over tiles with classes, and its error to the float64 twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Geometry, Window
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.evals.bench.attention import Timing, copies_of, graph_seconds
from aatc_cli.evals.bench.tile_plan import RULE, synthetic_codecs, synthetic_tiles
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.reference import TileQuery, decode_attention
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels.angles import TileTurns, fast_lots
from aatc_cli.runtime.kernels.decode_tiles import TileCall, TileCounters, TileDecoder
from aatc_cli.runtime.kernels.tile_shape import TileShape
from aatc_cli.runtime.tiles.layer import TileLayer

# tiles that are coded; a pool repeats them, so that codes of every page are those of a tile
_DISTINCT = 64


@dataclass(frozen=True)
class TileInputs:
    """What a call reads: pools uint8 [pages, tile_bytes] that are cycled through, exact rows, a query, counters."""

    pools: list[Tensor]
    rows: tuple[Tensor, Tensor]
    query: Tensor
    counters: TileCounters


@dataclass
class TileBench:
    """One layer's attention over random tiles of sequences of ``lengths`` tokens."""

    geometry: Geometry
    window: Window
    layer: TileLayer
    tables: TileTables
    frequencies: Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls, geometry: Geometry, window: Window, bits: float, theta: float, lengths: list[int], device: torch.device
    ) -> TileBench:
        """Of a geometry at ``bits`` a number; ``theta`` is the base of its rotary frequencies."""
        steps = torch.arange(0, geometry.head_dim, 2, device=device, dtype=torch.float64) / geometry.head_dim
        codecs = synthetic_codecs(geometry, bits, device)
        held = RecordTiles(codecs, RULE, geometry.kv_heads)
        layer = TileLayer(0, codecs, {"k": None, "v": None}, RULE, geometry.kv_heads, held)
        return cls(geometry, window, layer, TileTables.of(codecs, held, layer.biases), theta**-steps, lengths)

    @property
    def tiles(self) -> list[int]:
        """Packed tiles of every sequence."""
        return [packed_tokens(length, self.window) // TILE for length in self.lengths]

    @property
    def shape(self) -> TileShape:
        """What the launch is made for."""
        g, t = self.geometry, self.tables
        return TileShape(
            len(self.lengths),
            g.kv_heads,
            g.heads // g.kv_heads,
            RULE.classes,
            g.head_dim,
            self.window.sinks + self.window.recent,
            self.window.sinks,
            max(1, *self.tiles),
            t.tile_bytes,
            fast_lots(self.frequencies),
            t.steps,
            t.stage_bytes,
            t.biased,
            RULE.lags(self.window.recent),
            g.head_dim**-0.5,
        )

    def measure(self, repeats: int, chunk: int | None = None) -> tuple[Timing, float]:
        """Times of a call, and the relative error of the first and the last sequence's output to the twin."""
        given, shape, device = self._inputs(), self.shape, self.frequencies.device
        decoder = TileDecoder(shape, torch.bfloat16, device, chunk)
        turns = TileTurns.of(self.frequencies, self.window.sinks, shape.max_tiles, self.window.recent)
        out, heads = torch.empty_like(given.query), shape.batch * shape.kv_heads
        received = torch.zeros(heads, shape.slots, device=device)

        def call() -> int:
            for pool in given.pools:
                decoder(TileCall(given.query, pool, self.tables, turns, given.rows, given.counters, received), out)
            return len(given.pools)

        call()
        error = max(self._error(given, out, row) for row in {0, shape.batch - 1})
        moved = sum(self.tiles) * self.tables.tile_bytes + given.rows[0].nbytes + given.rows[1].nbytes
        return Timing("fused-tiles", graph_seconds(call, repeats), moved), error

    def _error(self, given: TileInputs, out: Tensor, row: int) -> float:
        counters, one = given.counters, slice(row, row + 1)
        pages = counters.pages[row, : self.tiles[row]].to(torch.int64)
        query = TileQuery(
            given.query[one],
            given.rows[0][one],
            given.rows[1][one],
            counters.tokens[one],
            counters.tiles[one],
            self.frequencies,
            self.window.sinks,
            self.window.sinks,
            self.geometry.head_dim**-0.5,
            RULE.lags(self.window.recent),
        )
        expected, _ = decode_attention(self.layer, [given.pools[-1][pages]], query, self.tables)
        return float((out[one] - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    def _inputs(self) -> TileInputs:
        """Tiles at shuffled pages, exact rows and a query from seed 0."""
        device, window, held = self.frequencies.device, self.window, self.layer.held
        assert isinstance(held, RecordTiles)
        generator = torch.Generator(device).manual_seed(0)
        count, batch = max(sum(self.tiles), 1), len(self.lengths)
        distinct = synthetic_tiles(self.layer.codecs, held, _DISTINCT, generator)
        pools = []
        for _ in range(copies_of(count * held.nbytes)):
            pools.append(distinct[torch.randint(_DISTINCT, (count,), device=device, generator=generator)])
        order = torch.randperm(count, device=device, generator=generator).to(torch.int32)
        pages = torch.zeros(batch, max(1, *self.tiles), dtype=torch.int32, device=device)
        for row, (start, mine) in enumerate(zip(_starts(self.tiles), self.tiles, strict=True)):
            pages[row, :mine] = order[start : start + mine]

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, device=device, dtype=torch.bfloat16, generator=generator)

        slots = window.sinks + window.recent
        rows = normal(slots, self.geometry.channels), normal(slots, self.geometry.channels)
        query = normal(self.geometry.heads, self.geometry.head_dim)
        tokens, tiles = (torch.tensor(x, dtype=torch.int32, device=device) for x in (self.lengths, self.tiles))
        return TileInputs(pools, rows, query, TileCounters(tokens, tiles, pages))


def _starts(counts: list[int]) -> list[int]:
    """Sums of the counts before each."""
    found = [0]
    for count in counts[:-1]:
        found.append(found[-1] + count)
    return found
