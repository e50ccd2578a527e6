"""Decode attention of a batch over the engine's blocks: the kernel of tiles on a GPU, its twin on a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from aatc_cli.runtime.fused_tiles.reference import TileQuery, decode_attention
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels.angles import TileTurns, fast_lots
from aatc_cli.runtime.kernels.decode_tiles import TileCall, TileCounters, TileDecoder, TileScratch
from aatc_cli.runtime.kernels.launch import ELEMENTS, function
from aatc_cli.runtime.kernels.tile_shape import TileShape
from aatc_cli.serve.vllm_backend.rows import ExactSlots
from aatc_cli.serve.vllm_backend.sound import Soundness

# kernels that are compiled at once, at most
_THREADS = 16
# sequences that a launch is made for, so that few shapes are made in all
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def launch_size(batch: int, slots: int) -> int:
    """Sequences of the launch that ``batch`` of them take part in: no more than there are ``slots``, and tables of."""
    return min(next((size for size in _SIZES if size >= batch), batch), slots)


class Decoding:
    """Decode attention of all layers; tables and scratch are made once for every size of a batch.

    tokens and tiles int32 [slots] are read on the device, and so are blocks, by rows of the engine's own block table.
    """

    def __init__(self, form: FusedTilesStatic, exact: ExactSlots, scaling: float, plan: str) -> None:
        self.form, self.exact, self.scaling = form, exact, scaling
        device = form.frequencies.device
        self.tokens, self.tiles = (torch.zeros(exact.slots, dtype=torch.int32, device=device) for _ in range(2))
        self.compiled = form.layers[0].tables is not None
        self.fast = fast_lots(form.frequencies)
        self.sound = Soundness(plan, device)
        self._ready: dict[tuple[int, int, int, int], TileDecoder] = {}
        self._turns: dict[int, TileTurns] = {}
        self._decoders: dict[TileShape, TileDecoder] = {}
        self._paged: dict[tuple[int, int], TileTables] = {}
        self._scratch: dict[tuple[int, int], TileScratch] = {}

    def prepare(self, batch: int, pages: list[int], blocks: Tensor) -> None:
        """Make what launches of ``batch`` sequences need, before anything is captured; pages: bytes, by layer."""
        if self.compiled:
            columns = blocks.stride(0)
            shapes = [self._shape(layer, page, self._size(batch), columns) for layer, page in enumerate(pages)]
            compile_shapes(shapes, self.form.dtype, self.form.frequencies.device)
            self._angles(columns)
            for layer, page in enumerate(pages):
                self._decoder(layer, page, self._size(batch), columns)

    def __call__(self, layer: int, query: Tensor, cache: Tensor, blocks: Tensor, out: Tensor) -> None:
        """Attention of rotated queries [B, Hq, D] of the first B slots over blocks int32 [B, n] of ``cache``."""
        self._attend(layer, query, cache, blocks, out)
        if layer == len(self.form.layers) - 1:
            self.sound.look(out, self.tokens[: query.shape[0]])

    def _attend(self, layer: int, query: Tensor, cache: Tensor, blocks: Tensor, out: Tensor) -> None:
        if not self.compiled:
            out.copy_(self._by_twin(layer, query, cache, blocks))
            return
        count, page = query.shape[0], int(cache.shape[1])
        columns = blocks.stride(0)
        decoder = self._decoder(layer, page, self._size(count), columns)
        if decoder.shape.batch > count:
            query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, decoder.shape.batch - count))
        tables, turns = self._tables(layer, page), self._angles(columns)
        whole = out if decoder.shape.batch == count and out.is_contiguous() else torch.empty_like(query)
        rows = self.exact.keys[layer], self.exact.values[layer]
        counters = TileCounters(self.tokens, self.tiles, blocks)
        decoder(TileCall(query.contiguous(), cache, tables, turns, rows, counters, self.exact.received[layer]), whole)
        if whole is not out:
            out.copy_(whole[:count])

    def _size(self, batch: int) -> int:
        return launch_size(batch, self.exact.slots)

    def _tables(self, layer: int, page: int) -> TileTables:
        """Tables for tiles that lie ``page`` bytes apart: a block may be a little larger than its tile."""
        found = self._paged.get((layer, page))
        if found is None:
            tables = self.form.layers[layer].tables
            assert tables is not None
            found = self._paged[layer, page] = replace(tables, tile_bytes=page)
        return found

    def _angles(self, columns: int) -> TileTurns:
        window = self.form.window
        if columns not in self._turns:
            self._turns[columns] = TileTurns.of(self.form.frequencies, window.sinks, columns, window.recent)
        return self._turns[columns]

    def _decoder(self, layer: int, page: int, batch: int, columns: int) -> TileDecoder:
        ready = self._ready.get((layer, page, batch, columns))
        if ready is None:
            shape = self._shape(layer, page, batch, columns)
            found = self._decoders.get(shape)
            if found is None:
                found = self._decoders[shape] = TileDecoder(shape, self.form.dtype, self.form.frequencies.device)
                # layers follow one another, so they share what a launch leaves behind for its own last program
                found.scratch = self._scratch.setdefault((batch, found.parts), found.scratch)
            ready = self._ready[layer, page, batch, columns] = found
        return ready

    def _shape(self, layer: int, page: int, batch: int, columns: int) -> TileShape:
        form, fused, tables = self.form, self.form.layers[layer], self.form.layers[layer].tables
        assert tables is not None
        heads, rule = fused.layer.heads, fused.layer.rule
        return TileShape(
            batch,
            heads,
            form.heads // heads,
            rule.classes,
            form.dim,
            self.exact.width,
            form.window.sinks,
            columns,
            page,
            self.fast,
            tables.steps,
            tables.stage_bytes,
            tables.biased,
            rule.lags(form.window.recent),
            self.scaling,
        )

    def _by_twin(self, layer: int, query: Tensor, cache: Tensor, blocks: Tensor) -> Tensor:
        form, window, count = self.form, self.form.window, query.shape[0]
        fused = form.layers[layer].layer
        data = [
            cache[row[: int(tiles)].long(), : fused.held.nbytes]
            for row, tiles in zip(blocks[:count], self.tiles[:count], strict=True)
        ]
        given = TileQuery(
            query,
            self.exact.keys[layer, :count],
            self.exact.values[layer, :count],
            self.tokens[:count],
            self.tiles[:count],
            form.frequencies,
            window.sinks,
            window.sinks,
            self.scaling,
            fused.rule.lags(window.recent),
        )
        out, received = decode_attention(fused, data, given)
        self.exact.received[layer, :count] += received.float()
        return out.to(query.dtype)


def compile_shapes(shapes: Sequence[TileShape], dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of all shapes, several at a time: NVRTC leaves the other threads alone."""
    wanted = dict.fromkeys(shape.defines(ELEMENTS[dtype]) for shape in shapes)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda d: function("tiles_sm90.cu", "attend_tiles", d, device.index or 0), wanted):
            pass
