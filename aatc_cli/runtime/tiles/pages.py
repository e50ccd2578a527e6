"""The tiles of some sequences, each a list of runs that are written once: shared by reference, never copied to grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# short runs are joined when there are so many, so that reading one does not take as many calls as tiles
_RUNS = 64


class TilePages:
    """Tiles of ``batch`` sequences, equally many of each. A run [m, n] holds m tiles that came together."""

    def __init__(self, batch: int) -> None:
        self.count = 0
        self._runs: list[list[Tensor]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, those that several sequences share counted once."""
        return sum({run.data_ptr(): run.nbytes for runs in self._runs for run in runs}.values())

    def append(self, tiles: Tensor) -> None:
        """Put tiles [b, m, n] behind those there are."""
        self.count += tiles.shape[1]
        for runs, mine in zip(self._runs, tiles, strict=True):
            # a tensor of its own: a view would keep the tiles of the other sequences alive
            runs.append(mine.clone())
            short = next((i for i, run in enumerate(reversed(runs)) if run.shape[0] >= _RUNS), len(runs))
            if short >= _RUNS:
                runs[-short:] = [torch.cat(runs[-short:])]

    def parts(self, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """(first tile, tiles [b, m, n]) from the first to the last, at most ``at_once`` of every sequence at a time."""
        first, held = 0, list[Tensor]()
        # the sequences of a store grow together, so their runs are alike
        for runs in zip(*self._runs, strict=True):
            for start in range(0, runs[0].shape[0], at_once):
                piece = torch.stack([run[start : start + at_once] for run in runs])
                if held and sum(part.shape[1] for part in held) + piece.shape[1] > at_once:
                    yield first, torch.cat(held, 1)
                    first, held = first + sum(part.shape[1] for part in held), []
                held.append(piece)
        if held:
            yield first, torch.cat(held, 1)

    def joined(self, empty: Tensor) -> Tensor:
        """All tiles [b, m, n]; ``empty`` [b, 0, n] of none."""
        return torch.stack([torch.cat(runs) for runs in self._runs]) if self.count else empty

    def select(self, places: Sequence[int]) -> TilePages:
        """The sequences at ``places``, repeats allowed, sharing their runs."""
        new = TilePages(len(places))
        new.count, new._runs = self.count, [list(self._runs[place]) for place in places]
        return new
