"""Rate control: how large the cells of every layer of a chunk are, so that the chunk takes the bytes of its plan.

Text that is louder than the calibration takes more bits than planned. A layer of a chunk has one number, its loudness
g: all its cells are g times as large, which is where reverse water-filling at another level would put them. Layers are
coded one after another, each within what is left of the bits planned up to it, so a chunk ends at its plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.cell_code import LOUDNESS_STEPS
from aatc_cli.core.stepped_tables import BITS
from aatc_cli.core.stored_layer import LayerCells, StoredLayer
from aatc_cli.core.stored_stream import stream_of
from aatc_cli.core.tile_bytes import order_bytes

# tokens of a chunk where nothing else says
CHUNK = 256
# of a layer's planned bits: how far above what is left it may end, how far below without another attempt; layers above
# make up for it, so all but the last few may be further off, which saves attempts
OVER, UNDER = 0.02, 0.06
_LOOSE, _STRICT = (0.1, 0.12), 3
# attempts in all, and those that are made for bits that are left over
_ATTEMPTS, _FINE = 16, 10
# the loudness at which nothing is left to say, taken where no attempt was within the bits
FARTHEST = 120.0 * LOUDNESS_STEPS
# first step of an attempt where bits do not fall; logarithm of bits that cells twice as large take off, to begin with
_LEAP, _SLOPE = 2.0 * LOUDNESS_STEPS, -1.2


Floats = NDArray[np.float64]
T = TypeVar("T")
# codes with loudness [..., tiles] int64: what coding gave, and its bits [..., chunks]
Attempt = Callable[[Tensor], tuple[T, Tensor]]


class RateControl:
    """Keeps the layers of a text to their bits, from the lowest up; chunks of ``chunk`` tokens each by itself."""

    def __init__(self, layers: Sequence[StoredLayer], heads: int, chunk: int = CHUNK) -> None:
        self.layers, self.heads, self.chunk = list(layers), heads, chunk
        self.planned = [_planned(layer, heads) for layer in layers]
        self.left = self.loudness = self.bits = np.zeros(0)

    def encode(self, place: int, rows: Tensor, below: Sequence[Tensor], classes: Tensor) -> tuple[LayerCells, Tensor]:
        """As `StoredLayer.encode` of layer ``place``; the lowest one begins new chunks."""
        layer, stream = self.layers[place], stream_of(self.layers[place], self.heads)

        def attempt(loudness: Tensor) -> tuple[tuple[LayerCells, Tensor], Tensor]:
            codes, decoded = layer.encode(rows, below, classes, loudness)
            assert isinstance(codes, LayerCells)
            return (codes, decoded), stream.bits(codes, classes, self.chunk)

        tiles = classes.shape[-1] // layer.rule.tile
        return self.fit(place, tiles, torch.zeros(rows.shape[:-2], device=rows.device), attempt)

    def fit(self, place: int, tiles: int, like: Tensor, attempt: Attempt[T]) -> T:
        """What ``attempt`` gives within the bits of layer ``place``, of ``tiles`` in each of the texts of ``like``."""
        by_chunk = self.chunk // self.layers[place].rule.tile
        sizes = [float(min(by_chunk, tiles - start)) for start in range(0, tiles, by_chunk)]
        planned = np.broadcast_to(self.planned[place] * np.array(sizes), (*like.shape, len(sizes)))
        if not place:
            self.left = self.bits = self.loudness = np.zeros_like(planned)
        room = self.left + planned
        strict = place >= len(self.layers) - _STRICT
        search = _Search(self.loudness, room, planned, (OVER, UNDER) if strict else _LOOSE)
        for number in range(_ATTEMPTS):
            by_tile = np.repeat(search.index.astype(np.int64), by_chunk, -1)[..., :tiles]
            found, measured = attempt(torch.from_numpy(by_tile).to(like.device))
            bits: Floats = measured.cpu().numpy()
            if search.ended(bits, number):
                break
        self.loudness, self.left, self.bits = search.index, room - bits, self.bits + bits
        return found


class _Search:
    """Loudness [..., chunks] by which a layer comes to its ``room``: on a line through attempts, between known ends.

    index: of the next attempt. off: of the planned bits, how far above its room it may end, and how far below.
    """

    def __init__(self, index: Floats, room: Floats, planned: Floats, off: tuple[float, float]) -> None:
        self.index, self.room = index, room
        self.most, self.least = room + off[0] * planned, room - off[1] * planned
        self.below, self.above = np.full_like(index, -FARTHEST), np.full_like(index, FARTHEST)
        self.before: tuple[Floats, Floats] | None = None
        self.leap = np.full_like(index, _LEAP)

    def ended(self, bits: Floats, attempt: int) -> bool:
        """Whether all chunks are within their room; else the next attempt is at hand."""
        much = bits > self.most
        little = (bits < self.least) & (self.index > -FARTHEST)
        wrong = (much & (self.index < FARTHEST)) | (little & (self.above - self.below > 1) & (attempt < _FINE))
        if not wrong.any() or attempt == _ATTEMPTS - 1:
            return True
        self.below = np.where(much, np.maximum(self.below, self.index), self.below)
        self.above = np.where(much, self.above, np.minimum(self.above, self.index))
        better = np.full_like(self.index, FARTHEST) if attempt == _ATTEMPTS - 2 else self._better(bits, much)
        self.before = self.index, bits
        self.index = np.where(wrong, better, self.index)
        return False

    def _better(self, bits: Floats, much: NDArray[np.bool_]) -> Floats:
        """On a line through the last two attempts, at what there is room for or a little less."""
        slope, flat = np.full_like(bits, _SLOPE / LOUDNESS_STEPS), np.zeros_like(much)
        if self.before is not None:
            index, other = self.before
            moved = self.index != index
            found = np.log(bits / other) / np.where(moved, self.index - index, 1.0)
            flat = moved & (found > 0.1 * slope)
            slope = np.where(moved & ~flat, np.maximum(found, 4 * slope), slope)
        wanted = np.maximum((2 * self.room + self.most + self.least) / 4, 1.0)
        step = np.rint(np.clip(np.log(wanted / bits) / slope, -_LEAP, 2 * _LEAP))
        # what saturates says nothing of how far it is
        step = np.where(flat & much, self.leap, step)
        self.leap = np.where(flat, 4 * self.leap, self.leap)
        step = np.where(much, np.maximum(step, 1.0), np.minimum(step, -1.0))
        near = self.index + step
        inside = (near > self.below) & (near < self.above)
        found_index: Floats = np.where(inside, near, np.floor((self.below + self.above) / 2))
        return found_index


def _planned(layer: StoredLayer, heads: int) -> float:
    """Bits of a tile of a layer by its plan."""
    table = torch.tensor(BITS, dtype=torch.float64)
    quotas = torch.tensor(layer.rule.quotas, dtype=torch.float64)
    codes = [quotas @ table[codec.bits.cpu()].sum(-1) for codec in layer.codecs.values()]
    return math.fsum(map(float, codes)) + 8.0 * order_bytes(layer.rule, heads)
