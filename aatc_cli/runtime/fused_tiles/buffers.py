"""Exact rows, tiles and sums of a fused cache: the contents of a cache of tiles in tensors of fixed place.

A kernel reads them where they are, so they are written in place and grow by copying, where `runtime.exact`,
`runtime.tiles.pages` and `runtime.tiles.received` replace tensors. What they hold is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.runtime.exact import ExactRows
from aatc_cli.runtime.tiles.pages import TilePages
from aatc_cli.runtime.tiles.received import Received

# tiles that a store without a fixed room has more than it needs, at least, and as a share
_SPARE, _SHARE = 8, 8


class SlotRows(ExactRows):
    """Exact rows in slots: keys and values [b, s + w, C], the sinks and then the ring; names are views of them."""

    def __init__(self, window: Window, empty: Tensor) -> None:
        slots = window.sinks + window.recent
        shape = (empty.shape[0], slots, empty.shape[2])
        self.keys, self.values = (torch.zeros(shape, dtype=empty.dtype, device=empty.device) for _ in range(2))
        super().__init__(window, empty)
        self._hold(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these in place."""
        self._hold(tensors["sink_keys"].shape[1], tensors["ring_keys"].shape[1])
        for name in self.NAMES:
            getattr(self, name).copy_(tensors[name])

    def fill_sinks(self, keys: Tensor, values: Tensor, tokens: int) -> int:
        """Take the sinks among rows [b, n, C] that follow ``tokens`` tokens; how many they are."""
        free = min(max(self.window.sinks - tokens, 0), keys.shape[1])
        if free:
            self._hold(tokens + free, self.ring_keys.shape[1])
            self.sink_keys[:, tokens:], self.sink_values[:, tokens:] = keys[:, :free], values[:, :free]
        return free

    def write(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Write rows [b, n, C] of the tokens from ``before`` behind the sinks on; the oldest make room."""
        self._hold(self.sink_keys.shape[1], min(before + keys.shape[1], self.window.recent))
        super().write(keys, values, before)

    def shorten(self, tokens: int) -> None:
        """Keep what ``tokens`` tokens need."""
        sinks = min(tokens, self.window.sinks)
        self._hold(sinks, min(tokens - sinks, self.window.recent))

    def _hold(self, sinks: int, slots: int) -> None:
        first = self.window.sinks
        self.sink_keys, self.sink_values = self.keys[:, :sinks], self.values[:, :sinks]
        self.ring_keys, self.ring_values = (rows[:, first : first + slots] for rows in (self.keys, self.values))


class PooledTiles(TilePages):
    """Tiles of ``batch`` sequences in one pool uint8 [b * capacity, n], those of a sequence behind one another.

    pages int32 [b, capacity]: the place in the pool of every tile.
    """

    def __init__(self, batch: int, nbytes: int, capacity: int, fixed: bool, device: torch.device) -> None:
        self.count, self.batch, self.fixed = 0, batch, fixed
        self.data = torch.zeros(batch, capacity, nbytes, dtype=torch.uint8, device=device)
        self.pages = self._numbered()

    @property
    def nbytes(self) -> int:
        """Bytes allocated, room to spare included."""
        return self.data.nbytes

    @property
    def capacity(self) -> int:
        """Tiles that there is room for."""
        return int(self.data.shape[1])

    def append(self, tiles: Tensor) -> None:
        """Put tiles [b, m, n] behind those there are."""
        needed = self.count + tiles.shape[1]
        if needed > self.capacity:
            data = self.data.new_zeros(self.batch, needed + max(needed // _SHARE, _SPARE), self.data.shape[2])
            data[:, : self.count] = self.data[:, : self.count]
            self.data = data
            self.pages = self._numbered()
        self.data[:, self.count : needed] = tiles
        self.count = needed

    def parts(self, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """(first tile, tiles [b, m, n]) from the first to the last, at most ``at_once`` of every sequence at a time."""
        for start in range(0, self.count, at_once):
            yield start, self.data[:, start : min(start + at_once, self.count)]

    def joined(self, empty: Tensor) -> Tensor:
        """All tiles [b, m, n]."""
        return self.data[:, : self.count].clone()

    def select(self, places: Sequence[int]) -> PooledTiles:
        """The sequences at ``places``, repeats allowed, in a pool of their own."""
        index = torch.tensor(places, device=self.data.device)
        new = PooledTiles(len(places), 0, 0, self.fixed, self.data.device)
        new.data, new.count = self.data.index_select(0, index), self.count
        new.pages = new._numbered()
        return new

    def _numbered(self) -> Tensor:
        device = self.data.device
        return torch.arange(self.batch * self.capacity, dtype=torch.int32, device=device).view(self.batch, -1)


class SlotSums(Received):
    """What recent tokens received, in a tensor for the whole ring: held [b, orders, w], of which ``sums`` is a view."""

    def __init__(self, window: Window, empty: Tensor) -> None:
        self.held = empty.new_zeros(*empty.shape[:2], window.recent)
        super().__init__(window, empty)

    def write(self, ahead: Tensor, before: int) -> None:
        """Write what new tokens [b, orders, n] have received into their slots; ``before`` tokens were there."""
        self.show(min(before + ahead.shape[2], self.window.recent))
        super().write(ahead, before)

    def load(self, sums: Tensor) -> None:
        """Put these in place: [b, orders, slots]."""
        self.show(sums.shape[2])
        self.sums.copy_(sums)

    def show(self, slots: int) -> None:
        """Let ``sums`` be those of as many slots."""
        self.sums = self.held[..., :slots]
