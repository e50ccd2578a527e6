"""Pages of tiles that sequences of any length share: taken when a tile is packed, given back when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused_tiles.buffers import PooledTiles


class TilePool:
    """``pages`` pages of every layer, whose tiles have ``sizes`` bytes: data[layer] uint8 [pages, n].

    The same page of all layers holds the same tile of a sequence, so one table of pages serves them all.
    """

    def __init__(self, sizes: Sequence[int], pages: int, device: torch.device) -> None:
        self.data = [torch.zeros(pages, size, dtype=torch.uint8, device=device) for size in sizes]
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """Pages that nothing lies in."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(data.nbytes for data in self.data)

    def take(self, count: int) -> list[int]:
        """Pages for ``count`` tiles; raises `AatcError` where there are not so many."""
        if count > len(self._free):
            raise AatcError(
                f"{count} tiles do not fit into {len(self._free)} free pages", "end a sequence, or make a larger pool"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back that nobody reads any more."""
        self._free.extend(pages)


class SharedPages(PooledTiles):
    """One layer's pages of a pool, as a fused store has its tiles: ``pages`` int32 [b, most] is all layers' table."""

    def __init__(self, data: Tensor, pages: Tensor) -> None:
        self.data, self.pages = data, pages
        self.count, self.batch, self.fixed = 0, int(pages.shape[0]), True

    @property
    def capacity(self) -> int:
        """Tiles that a sequence may have."""
        return int(self.pages.shape[1])
