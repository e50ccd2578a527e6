"""What the fused stores of all layers of some sequences share: tables, counters, angles and kernels on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.runtime.fused_tiles.buffers import PooledTiles, SlotRows, SlotSums
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels.angles import TileTurns, fast_lots
from aatc_cli.runtime.kernels.decode_tiles import TileCall, TileCounters, TileDecoder
from aatc_cli.runtime.kernels.tile_shape import TileShape
from aatc_cli.runtime.tiles.layer import TileLayer


@dataclass(frozen=True)
class FusedTiles:
    """One layer: its codecs and records, and where a kernel decodes them, its tables.

    order [D]: dimensions of a head as pairs (i, i + D / 2) that turn together; None where they lie so.
    """

    layer: TileLayer
    tables: TileTables | None
    order: Tensor | None


@dataclass(frozen=True)
class FusedTilesStatic:
    """Tables and shape of all layers; frequencies float64 [D / 2] of the pairs of `FusedTiles.order`."""

    layers: tuple[FusedTiles, ...]
    window: Window
    dtype: torch.dtype
    heads: int
    dim: int
    frequencies: Tensor


class FusedTilesShared:
    """Counters of ``batch`` sequences of one length, as kernels read them. The first layer of a step moves them."""

    def __init__(self, form: FusedTilesStatic, batch: int) -> None:
        self.form, self.batch = form, batch
        self.compiled = form.layers[0].tables is not None
        device = form.frequencies.device
        self.tokens, self.tiles = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.state = (-1, -1)
        self.angles = (-1, -1)
        self.turns: TileTurns | None = None
        # while a step is captured: what it does may depend on nothing that the host counts
        self.steady = False
        # of a captured step, for all its layers: where its rows go, and what exact slots receive, [L, B, H, slots]
        self.slot = self.tokens[:1].to(torch.int64)
        self.paid: Tensor | None = None
        # read off the device here: a step that is captured may not
        self._fast = fast_lots(form.frequencies)
        self._decoders: dict[TileShape, TileDecoder] = {}

    def move(self, tokens: int, tiles: int, capacity: int, offset: int) -> None:
        """Bring counters to ``tokens`` cached tokens, ``tiles`` tiles of them packed; the first is at ``offset``."""
        if (tokens, tiles) != self.state:
            self.tokens.fill_(tokens)
            self.tiles.fill_(tiles)
            self.state = (tokens, tiles)
        if (capacity, offset) != self.angles:
            window = self.form.window
            self.turns = TileTurns.of(self.form.frequencies, window.sinks + offset, capacity, window.recent)
            self.angles = (capacity, offset)

    def write(self, place: int, exact: SlotRows, received: SlotSums, keys: Tensor, values: Tensor) -> None:
        """Write the row [B, 1, C] of the next token of every sequence where the device counts it to be.

        The layer at ``place`` 0 counts. Sequences have more tokens than sinks, and as many of them.
        """
        sinks = self.form.window.sinks
        if place == 0:
            self.tokens += 1
            self.begin(self.tokens[:1])
        exact.keys[:, sinks:].index_copy_(1, self.slot, keys)
        exact.values[:, sinks:].index_copy_(1, self.slot, values)
        received.held.index_fill_(2, self.slot, 0.0)

    def begin(self, tokens: Tensor) -> None:
        """What all layers of a step need, once: where the newest of ``tokens`` goes in the ring, and clean sums."""
        window = self.form.window
        self.slot = (tokens.to(torch.int64) - 1 - window.sinks) % window.recent
        if self.paid is None:
            heads = self.form.layers[0].layer.heads
            shape = len(self.form.layers), self.batch, heads, window.sinks + window.recent
            self.paid = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
        self.paid.zero_()

    def decode(
        self,
        query: Tensor,
        pages: PooledTiles,
        fused: FusedTiles,
        rows: tuple[Tensor, Tensor],
        scaling: float,
        paid: Tensor,
    ) -> Tensor:
        """Attention of one rotated query per sequence [B, Hq, D]; what exact slots receive is added to ``paid``."""
        tables, turns = fused.tables, self.turns
        assert tables is not None
        assert turns is not None
        shape = self._shape(tables, pages.capacity, fused.layer, scaling)
        if shape not in self._decoders:
            self._decoders[shape] = TileDecoder(shape, self.form.dtype, query.device)
        counters = TileCounters(self.tokens, self.tiles, pages.pages)
        out = torch.empty_like(query)
        call = TileCall(query, pages.data, tables, turns, rows, counters, paid)
        return self._decoders[shape](call, out)

    def _shape(self, tables: TileTables, capacity: int, layer: TileLayer, scaling: float) -> TileShape:
        form, rule = self.form, layer.rule
        return TileShape(
            self.batch,
            layer.heads,
            form.heads // layer.heads,
            rule.classes,
            form.dim,
            form.window.sinks + form.window.recent,
            form.window.sinks,
            capacity,
            tables.tile_bytes,
            self._fast,
            tables.steps,
            tables.stage_bytes,
            tables.biased,
            rule.lags(form.window.recent),
            scaling,
        )
