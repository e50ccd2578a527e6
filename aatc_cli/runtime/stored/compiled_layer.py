"""One layer of a code of even cells in machine code (numba) and products of bfloat16: the same bytes, much sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core import entropy_coder as coder
from aatc_cli.core.cell_code import LOUDNESS_STEPS
from aatc_cli.core.layer_products import HELD, LayerProducts
from aatc_cli.core.stepped_tables import MODELS, SYMBOLS, WIDEST, code_lengths, levels, most, step
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.stored_runs import PLAIN
from aatc_cli.core.stored_stream import LayerStream, Parsed
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.errors import AatcError

Cells = NDArray[np.int16]
Models = NDArray[np.uint8]


def loops_available() -> bool:
    """Whether numba is there, which makes the machine code."""
    return find_spec("numba") is not None


class CompiledLayer:
    """One layer on the CPU; needs numba. Raises `AatcError` as `LayerStream` does."""

    def __init__(self, layer: StoredLayer, heads: int) -> None:
        self.layer, self.stream, self.products = layer, LayerStream(layer, heads), LayerProducts(layer)
        self.loops: Any = import_module("aatc_cli.runtime.kernels.cell_symbols")
        self.mean = None if layer.mean is None else layer.mean.float()
        self.units = [
            self._unit(place, span) for place, span in enumerate(self.products.spans) if span.start < span.stop
        ]
        self.lengths = np.concatenate([np.zeros((SYMBOLS, MODELS)), *(code_lengths(w) for w in range(1, WIDEST + 1))])
        self.place_of_runs = np.array([run.place for run in self.stream.runs], dtype=np.int64)
        self._runs = lru_cache(maxsize=8)(self._made_runs)

    def unpacked(self, data: bytes, tokens: int) -> tuple[Tensor, Tensor]:
        """What is coded of the layer, [T, E] in units of their size, and classes [orders, T], from its bytes."""
        parsed = self.stream.parse(data, tokens)
        return self._latents(parsed, tokens), parsed.classes

    def _latents(self, parsed: Parsed, tokens: int) -> Tensor:
        runs, columns = self._runs(tokens // self.layer.rule.tile)
        out = np.zeros((tokens, self.products.columns.numel()), dtype=np.float32)
        sound = self.loops.decode(
            np.frombuffer(parsed.stream, dtype="<u2"),
            coder.entries().ravel(),
            self._with_models(runs, parsed.models),
            self._rows(parsed.classes),
            columns,
            _signed_levels()[0],
            np.frombuffer(parsed.plain + b"\0", dtype=np.uint8),
            parsed.outside,
            out,
        )
        if not sound:
            raise coder.wrong()
        found = torch.from_numpy(out)
        return found.mul_(_size(parsed.loudness)) if parsed.loudness else found

    def targets(self, rows: Tensor, below: Sequence[Tensor]) -> Tensor:
        """What is coded of rows [T, 2 C], but for what units before each tell: [T, E].

        Raises `AatcError` for numbers whose products are beyond floats.
        """
        found = self.products.targets(rows if self.mean is None else rows - self.mean, below)
        if not bool(torch.isfinite(found).all()):
            raise AatcError("keys or values are too large to be stored", "see what the model computes there")
        return found

    def code(self, targets: Tensor, classes: Tensor, loudness: int) -> tuple[Cells, Tensor, float, Models]:
        """Cells [T, E] of all units at one loudness, what they are read as, the bits they take, models of units."""
        cells, read = np.zeros(targets.shape, dtype=np.int16), torch.zeros(targets.shape)
        counts = np.zeros(max(self.stream.places, 1) * self.lengths.shape[0], dtype=np.int64)
        told, size, held = classes.numpy(), np.float32(_size(loudness)), read.numpy()
        wide, rounded = targets.float(), torch.zeros(targets.shape, dtype=HELD)
        for unit in self.units:
            mine = wide[:, unit.span]
            if unit.span.start:
                mine = mine - rounded[:, : unit.span.start] @ unit.across
            order = told[unit.order if told.shape[0] > 1 else 0]
            parts = cells[:, unit.span], held[:, unit.span]
            self.loops.code_unit(mine.numpy(), order, *unit.tables, size, *unit.bins, *parts, counts)
            rounded[:, unit.span] = read[:, unit.span]
        by_model = counts.reshape(-1, self.lengths.shape[0]) @ self.lengths
        bits = float(by_model.min(1).sum()) + 8.0 * self.stream.beside(targets.shape[0])
        return cells, read, bits, by_model.argmin(1).astype(np.uint8)[: self.stream.places]

    def pack(self, cells: Cells, models: Models, classes: Tensor, loudness: int) -> bytes:
        """The layer's bytes, as `LayerStream.pack`."""
        tiles = classes.shape[-1] // self.layer.rule.tile
        runs, columns = self._runs(tiles)
        count = self.stream.symbols * tiles
        words, outside = np.empty(count + 1, dtype=np.uint16), np.empty(count, dtype=np.int8)
        plain = np.zeros(-(-self.stream.plain * tiles // 8) + 1, dtype=np.uint8)
        numbered = self._with_models(runs, models)
        states, used, beyond = self.loops.encode_cells(
            cells, numbered, self._rows(classes), columns, *coder.shares(), words, outside, plain
        )
        stream = states.astype("<u4").tobytes() + words[:used][::-1].astype("<u2").tobytes()
        return self.stream.assemble(loudness, models, classes, (outside[:beyond][::-1], plain[:-1].tobytes(), stream))

    def _unit(self, place: int, span: slice) -> _Unit:
        meter, columns = self.stream.meter, self.products.columns[span]
        widths = meter.widths[:, columns].numpy()
        numbers = *(table[widths] for table in _cells()), _signed_levels()[0]
        bins = meter.base[:, columns].contiguous().numpy(), meter.shift[:, columns].contiguous().numpy()
        order = self.layer.units[place].group
        return _Unit(span, order, self.products.across[place], numbers, bins)

    def _made_runs(self, tiles: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Runs as the loops have them, under model 0, and the columns of all."""
        tile, starts = self.layer.rule.tile, np.cumsum([0, *self.layer.rule.quotas])
        where = {int(column): at for at, column in enumerate(self.products.columns)}
        found: list[tuple[int, ...]] = []
        columns: list[int] = []
        for run in self.stream.runs:
            first = run.order * tiles * tile + int(starts[run.k])
            row, origin = coder.table_row(run.width, 0), _signed_levels()[1][run.width]
            quota = self.layer.rule.quotas[run.k]
            found.append(
                (row, first, quota, tiles, tile, len(columns), run.columns.size, origin, int(PLAIN[run.width]))
            )
            columns += [where[int(column)] for column in run.columns]
        return np.array(found, dtype=np.int64).reshape(-1, 9), np.array(columns, dtype=np.int64)

    def _with_models(self, runs: NDArray[np.int64], models: Models) -> NDArray[np.int64]:
        found = runs.copy()
        found[:, 0] += models[self.place_of_runs]
        return found

    def _rows(self, classes: Tensor) -> NDArray[np.int64]:
        """Tokens of every tile by class, orders one after another; classes [orders, T]."""
        order = rows_of(torch.unflatten(classes, -1, (-1, self.layer.rule.tile))).numpy()
        found: NDArray[np.int64] = order + np.arange(order.shape[1])[:, None] * self.layer.rule.tile
        return found.reshape(-1)


@dataclass(frozen=True)
class _Unit:
    """A unit with bits. span: among the coded columns; tables, bins: as `kernels.cell_symbols.code_unit` has them."""

    span: slice
    order: int
    across: Tensor
    tables: tuple[NDArray[Any], ...]
    bins: tuple[NDArray[Any], ...]


@lru_cache
def _cells() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """By resolution, 0 for none: cells in a latent of size 1, largest number of one, where levels have number 0."""
    every = range(1, WIDEST + 1)
    inverse = np.array([0.0, *(1.0 / step(width) for width in every)], dtype=np.float32)
    largest = np.array([0.0, *(float(most(width)) for width in every)], dtype=np.float32)
    origins = _signed_levels()[1]
    return inverse, largest, np.array([origins[1], *(origins[width] for width in every)], dtype=np.int64)


def _size(loudness: int) -> float:
    return float(2.0 ** (loudness / LOUDNESS_STEPS))


@lru_cache
def _signed_levels() -> tuple[NDArray[np.float32], dict[int, int]]:
    """Levels of all cells of all resolutions by their number with its sign, and where number 0 of each stands."""
    parts, origins, at = [], {}, 0
    for width in range(1, WIDEST + 1):
        up = np.append(levels(width), 0.0)
        parts.append(np.concatenate([-up[:0:-1], up]))
        origins[width] = at + most(width) + 1
        at += parts[-1].size
    return np.concatenate(parts).astype(np.float32), origins
