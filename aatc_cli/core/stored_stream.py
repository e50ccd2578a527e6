"""Codes of a layer of a chunk as bytes of variable size: cells under an entropy code.

    layer = head | model of every unit and class (1 byte each) | classes of every tile | symbols outside | plain bits |
            entropy-coded words
    head = loudness of the layer (int16) | symbols outside (uint32)

Every unit of a class has the model, out of 16 scales, under which its codes of the chunk are shortest: text that is
louder than the calibration, or quieter, costs a model and not a mismatch. Symbols follow one another run by run, a run
being the channels of one resolution of one unit in one class: token by token, tokens by class within their tile.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core import entropy_coder as coder
from aatc_cli.core.stepped_tables import MODELS, MOST, OUTSIDE, plain_bits
from aatc_cli.core.stored_layer import LayerCells, StoredLayer
from aatc_cli.core.stored_meter import Meter
from aatc_cli.core.stored_runs import PLAIN, Ints, packed_plain, runs_of, unpacked_plain
from aatc_cli.core.stored_tags import Tags
from aatc_cli.core.tile_classes import rows_of

_HEAD = struct.Struct("<hI")


@dataclass(frozen=True)
class Parsed:
    """A layer's bytes in their parts."""

    loudness: int
    models: NDArray[np.uint8]
    classes: Tensor
    outside: NDArray[np.int8]
    plain: bytes
    stream: bytes


class LayerStream:
    """How one layer's codes lie in a chunk. ``heads``: kv heads, which may rank tokens each by itself."""

    def __init__(self, layer: StoredLayer, heads: int) -> None:
        self.rule, self.tags, self.orders = layer.rule, Tags(layer.rule, heads), layer.rule.orders(heads)
        self.device = layer.codes[0].encode.device
        self.size = 2 * layer.channels
        self.runs = list(runs_of(layer, self.orders))
        self.places = 1 + max((run.place for run in self.runs), default=-1)
        counts = [self.rule.quotas[run.k] * run.columns.size for run in self.runs]
        # of a tile: symbols, and bits of them that are kept as they are
        self.symbols = sum(counts)
        self.plain = sum(count * plain_bits(run.width) for run, count in zip(self.runs, counts, strict=True))
        self.meter = Meter(layer, self.places, self.orders)
        self._indices = lru_cache(maxsize=8)(self._made_indices)

    def beside(self, tokens: int) -> int:
        """Bytes of a chunk that no symbol takes: head, models, classes, states of the lanes."""
        return _HEAD.size + self.places + self.tags.nbytes(tokens // self.rule.tile) + coder.STATE_BYTES

    def bits(self, codes: LayerCells, classes: Tensor, chunk: int) -> Tensor:
        """Bits that `pack` takes at most of every chunk of ``chunk`` tokens, the last maybe shorter: [..., chunks].

        It takes a byte of every lane less, on average. classes [..., orders, T].
        """
        tokens = classes.shape[-1]
        found = self.meter.lengths(codes.cells, classes, chunk)
        beside = [8.0 * self.beside(min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
        return found + torch.tensor(beside, dtype=found.dtype, device=found.device)

    def pack(self, codes: LayerCells, classes: Tensor) -> bytes:
        """Bytes of the codes and classes [orders, T] of a chunk."""
        tokens = classes.shape[-1]
        models = self.meter.models(codes.cells, classes)
        index, widths, place = self.indices(tokens // self.rule.tile)
        order = rows_of(torch.unflatten(classes, -1, (-1, self.rule.tile))).cpu().numpy()
        cells = codes.cells.reshape(-1).cpu().numpy()[self.targets(index, order)].astype(np.int64)
        shift = PLAIN[widths]
        high = cells >> shift
        symbols = np.where(np.abs(high) <= MOST, high + MOST, OUTSIDE).astype(np.uint8)
        rows = _rows(widths, models[place])
        symbols[~coder.has_share()[rows, symbols]] = OUTSIDE
        outside = high[symbols == OUTSIDE].astype(np.int8)
        plain = packed_plain(cells & ((1 << shift) - 1), shift)
        loudness = int(codes.loudness.flatten()[0])
        return self.assemble(loudness, models, classes, (outside, plain, coder.encoded(symbols, rows)))

    def assemble(
        self, loudness: int, models: NDArray[np.uint8], classes: Tensor, parts: tuple[NDArray[np.int8], bytes, bytes]
    ) -> bytes:
        """A layer's bytes; parts: symbols outside, plain bits, the stream."""
        outside, plain, stream = parts
        head = _HEAD.pack(loudness, outside.size)
        return b"".join((head, models.tobytes(), self.tags.pack(classes), outside.tobytes(), plain, stream))

    def parse(self, data: bytes, tokens: int) -> Parsed:
        """The parts of a layer's bytes; raises `AatcError` for bytes that are no layer."""
        tiles = tokens // self.rule.tile
        if len(data) < self.beside(tokens):
            raise coder.wrong()
        loudness, count = _HEAD.unpack_from(data)
        lengths = self.places, self.tags.nbytes(tiles), count, -(-self.plain * tiles // 8)
        ends = list(accumulate([_HEAD.size, *lengths]))
        if len(data) < ends[-1] + coder.STATE_BYTES or count > self.symbols * tiles:
            raise coder.wrong()
        coder.check(data[ends[-1] :])
        models, tags, outside, plain = (data[a:b] for a, b in pairwise(ends))
        found = np.frombuffer(models, dtype=np.uint8)
        if (found >= MODELS).any():
            raise coder.wrong()
        return Parsed(
            loudness,
            found,
            self.tags.unpack(tags, tiles),
            np.frombuffer(outside, dtype=np.int8),
            plain,
            data[ends[-1] :],
        )

    def rows(self, parsed: Parsed, tokens: int) -> NDArray[np.int32]:
        """Rows of the tables of all symbols in their order."""
        _, widths, place = self.indices(tokens // self.rule.tile)
        return _rows(widths, parsed.models[place])

    def cells(self, parsed: Parsed, symbols: NDArray[np.uint8], tokens: int) -> LayerCells:
        """Codes from symbols."""
        tiles = tokens // self.rule.tile
        index, widths, _ = self.indices(tiles)
        high = symbols.astype(np.int64) - MOST
        beyond = symbols == OUTSIDE
        if int(beyond.sum()) != parsed.outside.size:
            raise coder.wrong()
        high[beyond] = parsed.outside
        shift = PLAIN[widths]
        wide = np.zeros(high.size, dtype=np.int64)
        wide[shift > 0] = unpacked_plain(parsed.plain, shift)
        order = rows_of(torch.unflatten(parsed.classes, -1, (-1, self.rule.tile))).numpy()
        found = np.zeros(tokens * self.size, dtype=np.int32)
        found[self.targets(index, order)] = (high << shift) | wide
        loudness = torch.full((tiles,), parsed.loudness, dtype=torch.int64, device=self.device)
        return LayerCells(torch.from_numpy(found).view(tokens, self.size).to(self.device), loudness)

    def indices(self, tiles: int) -> tuple[tuple[Ints, Ints], Ints, Ints]:
        """Of every symbol: where its token stands among the rows by class, its column; resolution; place."""
        return self._indices(tiles)

    def targets(self, index: tuple[Ints, Ints], order: Ints) -> Ints:
        """Places of all symbols in cells [T, 2 C]; order [orders, tiles, t] of the rows of every tile."""
        slots, columns = index
        tiles = np.arange(order.shape[1])[:, None] * self.rule.tile
        found: Ints = (order + tiles).reshape(-1)[slots] * self.size + columns
        return found

    def _made_indices(self, tiles: int) -> tuple[tuple[Ints, Ints], Ints, Ints]:
        tile, starts = self.rule.tile, np.cumsum([0, *self.rule.quotas])
        slots, columns, widths, places = [], [], [], []
        for run in self.runs:
            first = (run.order * tiles + np.arange(tiles)) * tile + starts[run.k]
            rows = (first[:, None] + np.arange(self.rule.quotas[run.k])).reshape(-1)
            slots.append(np.repeat(rows, run.columns.size))
            columns.append(np.tile(run.columns, rows.size))
            widths.append(np.full(slots[-1].size, run.width))
            places.append(np.full(slots[-1].size, run.place))
        empty = np.zeros(0, dtype=np.int64)
        parts = [np.concatenate([empty, *part]) for part in (slots, columns, widths, places)]
        return (parts[0], parts[1]), parts[2], parts[3]


_STREAMS: WeakKeyDictionary[StoredLayer, LayerStream] = WeakKeyDictionary()


def stream_of(layer: StoredLayer, heads: int) -> LayerStream:
    """The stream of a layer, made once: evaluations ask for it with every window."""
    if layer not in _STREAMS:
        _STREAMS[layer] = LayerStream(layer, heads)
    return _STREAMS[layer]


def unpacked_streams(streams: Sequence[object], parts: Sequence[bytes], tokens: int) -> list[tuple[LayerCells, Tensor]]:
    """Codes and classes [orders, T] of all layers of a chunk; raises `AatcError` for bytes that are no layers."""
    mine = [stream for stream in streams if isinstance(stream, LayerStream)]
    parsed = [stream.parse(data, tokens) for stream, data in zip(mine, parts, strict=True)]
    rows = [stream.rows(each, tokens) for stream, each in zip(mine, parsed, strict=True)]
    symbols = coder.decoded([each.stream for each in parsed], rows)
    return [
        (stream.cells(each, read, tokens), each.classes.to(stream.device))
        for stream, each, read in zip(mine, parsed, symbols, strict=True)
    ]


def _rows(widths: Ints, models: NDArray[np.uint8]) -> NDArray[np.int32]:
    return (1 + (widths - 1) * MODELS + models).astype(np.int32)
