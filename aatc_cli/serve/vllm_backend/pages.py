"""The tiles of one request in the engine's blocks of one layer: tile n lies in its block n."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from aatc_cli.runtime.tiles.pages import TilePages


class BlockPages(TilePages):
    """``count`` tiles of ``nbytes`` bytes in blocks int64 [n] of a layer's cache uint8 [blocks, page bytes]."""

    def __init__(self, cache: Tensor, blocks: Tensor, nbytes: int, count: int) -> None:
        self.cache, self.blocks, self.size, self.count = cache, blocks, nbytes, count

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return self.count * self.size

    def append(self, tiles: Tensor) -> None:
        """Put tiles [1, m, nbytes] behind those there are."""
        needed = self.count + tiles.shape[1]
        self.cache[self.blocks[self.count : needed], : self.size] = tiles[0]
        self.count = needed

    def parts(self, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """(first tile, tiles [1, m, nbytes]) from the first to the last."""
        for start in range(0, self.count, at_once):
            stop = min(start + at_once, self.count)
            yield start, self.cache[self.blocks[start:stop], : self.size][None]

    def joined(self, empty: Tensor) -> Tensor:
        """All tiles [1, m, nbytes]."""
        return self.cache[self.blocks[: self.count], : self.size][None] if self.count else empty
