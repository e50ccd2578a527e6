"""Chunks to pages on a CPU with threads: the kernel of numba over some layers of one side at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.header import damaged
from aatc_cli.runtime.stored.pages import Pages, Scales
from aatc_cli.runtime.stored.rotation import Rotation
from aatc_cli.runtime.stored.tables import SideTables, side_tables

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STYLES = {"none": 0, "half": 1, "half-once": 1, "interleaved": 2}
# pieces that the layers of a side are cut into for every thread
_PIECES = 2


def host_available() -> bool:
    """Whether numba is there, which makes the kernel."""
    return find_spec("numba") is not None


@dataclass(frozen=True)
class LayerTables:
    """The tables of one side of all layers, one behind another, as `runtime.kernels.host_chunks` takes them.

    places [L + 1, 4]: first entry, slot and level of a layer, and bytes of its tile. level_bits, pair_basis: levels and
    basis in bfloat16, channels in pairs, the first of a part at pair_places [L, classes, groups].
    """

    first: SideTables
    places: Any
    parts: Any
    entries: Any
    slots: Any
    levels: Any
    level_bits: Any
    basis: Any
    pair_basis: Any
    pair_places: Any
    biases: Any

    @classmethod
    def of(cls, tables: Sequence[SideTables]) -> LayerTables:
        """Of the tables of every layer."""
        counts = [(len(t.entries), len(t.slots), len(t.levels)) for t in tables]
        starts = [list(accumulate(column, initial=0)) for column in zip(*counts, strict=True)]
        sizes = [*(t.nbytes for t in tables), 0]
        channels = tables[0].groups * tables[0].size
        levels = np.concatenate([t.levels for t in tables])
        pair_basis, pair_places = _pairs(tables)
        return cls(
            tables[0],
            np.array([*starts, sizes], dtype=np.int64).T.copy(),
            np.stack([t.parts for t in tables]),
            np.concatenate([t.entries.ravel() for t in tables]),
            np.concatenate([t.slots.ravel() for t in tables]),
            levels,
            _bfloat16(levels),
            np.concatenate([t.basis.ravel() for t in tables]),
            pair_basis,
            pair_places,
            np.stack([t.bias if t.bias.size else np.zeros(channels, dtype=np.float32) for t in tables]),
        )


def _bfloat16(numbers: Any) -> Any:
    """The bits of numbers in bfloat16, one a word."""
    narrow = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return narrow.astype(np.uint32)


def _pairs(tables: Sequence[SideTables]) -> tuple[Any, Any]:
    """Rows of the basis of every part in bfloat16, in pairs: words [pairs, E], and the first pair of every part."""
    places = np.zeros((len(tables), *tables[0].parts.shape[:2]), dtype=np.int64)
    words, size = [np.zeros((1, tables[0].size), dtype=np.uint32)], 1
    for layer, mine in enumerate(tables):
        bits = _bfloat16(mine.basis.ravel()).reshape(mine.basis.shape)
        for k, group in np.ndindex(*mine.parts.shape[:2]):
            first, count = mine.parts[k, group, :2]
            part = np.pad(bits[first : first + count], ((0, count % 2), (0, 0)))
            places[layer, k, group] = size
            words.append(part[0::2] | part[1::2] << 16)
            size += len(words[-1])
    return np.concatenate(words).astype(np.uint32).ravel(), places


@dataclass(frozen=True)
class _Chunk:
    """A chunk to decode: its bytes, where layers begin, the angles of its tokens, the first of them, its tiles."""

    data: Any
    starts: Any
    cos: Any
    sin: Any
    token: int
    tiles: int


class HostDecoder:
    """The pages of chunks of one codec; calls from several threads are served one after another by ``threads`` each."""

    def __init__(self, code: TileCode, rotation: Rotation, heads: int, threads: int) -> None:
        self.rotation, self.heads, self.layers = rotation, heads, len(code.layers)
        self.tables: dict[Side, LayerTables] = {
            side: LayerTables.of([_tables_of(layer, side) for layer in code.layers]) for side in SIDES
        }
        self.pool, pieces = pool_of(threads), min(_PIECES * threads, self.layers)
        self.bounds = [self.layers * piece // pieces for piece in range(pieces + 1)]
        self.kernels: Any = import_module("aatc_cli.runtime.kernels.host_chunks")

    def __call__(
        self,
        chunks: Sequence[memoryview],
        starts: Sequence[Sequence[int]],
        places: Tensor,
        dtype: torch.dtype,
        scales: Scales | None,
    ) -> Pages:
        """Pages of chunks that follow one another, whose layers begin at ``starts``, of tokens at ``places``.

        What no kernel writes goes by float32.
        """
        kind = 0 if scales is not None else _KINDS.get(dtype, 0)
        count, first = places.numel(), self.tables["k"].first
        channels, each = first.groups * first.size, count // len(chunks)
        held = torch.float32 if kind == 0 else torch.int16
        pages = {side: torch.empty(self.layers, count, channels, dtype=held) for side in SIDES}
        angles, style = self._angles(places), STYLES[self.rotation.style]
        # made before the threads, which would each make their own
        kernels = {
            side: self.kernels.kernel_of(
                first.size, channels // self.heads, turned * angles[0].shape[1], turned * style
            )
            for side, turned in (("k", 1), ("v", 0))
        }
        work = []
        for index, (data, begins) in enumerate(zip(chunks, starts, strict=True)):
            token = index * each
            mine = [table[token : token + each].ravel() for table in angles]
            whole = _aligned(np.frombuffer(data, dtype=np.uint8))
            chunk = _Chunk(whole, np.array(begins), mine[0], mine[1], token, each // TILE)
            work += [(side, chunk, *bound) for side in SIDES for bound in pairwise(self.bounds)]

        def some(task: tuple[Side, _Chunk, int, int]) -> bool:
            side, chunk, low, high = task
            return self._some(kernels[side], self.tables[side], chunk, (kind, pages[side].numpy()), (low, high))

        if not all(self.pool.map(some, work)):
            raise damaged("its tokens are not in the classes of its plan")
        if kind:
            whole_pages = {side: torch.unflatten(pages[side].view(dtype), -1, (self.heads, -1)) for side in SIDES}
            return Pages(whole_pages["k"], whole_pages["v"])
        return Pages.of_rows({side: pages[side] for side in SIDES}, self.heads, dtype, scales)

    def _angles(self, places: Tensor) -> tuple[Any, Any]:
        if not STYLES[self.rotation.style]:
            return (np.zeros((places.numel(), 0), dtype=np.float32),) * 2
        cos, sin = (table.to(torch.float32).contiguous().numpy() for table in self.rotation.full_tables(places))
        return cos, sin

    def _some(
        self, kernel: Any, held: LayerTables, chunk: _Chunk, target: tuple[int, Any], span: tuple[int, int]
    ) -> bool:
        """Layers ``span`` of one side of a chunk into pages [L, n, C] of a kind; whether its classes were sound."""
        tables, (kind, out) = held.first, target
        _, count, channels = out.shape
        none = np.zeros(0, dtype=np.float32 if kind else np.uint16)
        wide, narrow = (out.ravel(), none) if kind == 0 else (none, out.view(np.uint16).ravel())
        sound = kernel(
            chunk.data,
            chunk.data.view(np.uint32),
            chunk.data.view(np.uint16),
            chunk.starts,
            chunk.tiles,
            held.places,
            held.parts,
            held.entries,
            held.slots,
            held.levels,
            held.level_bits,
            held.basis,
            held.pair_basis,
            held.pair_places,
            tables.scales,
            tables.scale_bits,
            held.biases,
            tables.quotas,
            tables.orders,
            tables.class_bits,
            tables.class_stride,
            chunk.cos,
            chunk.sin,
            kind,
            wide,
            narrow,
            chunk.token * channels,
            count * channels,
            *span,
        )
        return bool(sound)


def _aligned(data: Any) -> Any:
    """The same bytes where words of four can be read."""
    if data.ctypes.data % 4 == 0 and data.size % 4 == 0:
        return data
    whole = np.zeros(-(-data.size // 4), dtype=np.uint32).view(np.uint8)
    whole[: data.size] = data
    return whole


def _tables_of(layer: Any, side: Side) -> SideTables:
    assert isinstance(layer.held, TilePacking)
    return side_tables(layer.held, side, layer.biases[side])


@lru_cache(maxsize=4)
def pool_of(threads: int) -> ThreadPoolExecutor:
    """The threads that all codecs of a process share."""
    return ThreadPoolExecutor(threads, thread_name_prefix="aatc-chunk")
