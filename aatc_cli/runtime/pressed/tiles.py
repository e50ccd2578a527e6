"""One layer's tiles behind a press: what stays of a prompt is coded in classes, and evicted tokens nobody sees.

The press acts when the prompt ends. What stays of a kv head fills tiles of its own by rank, or is of the classes that
the press says; what leaves the window later is kept whole, in tiles as without a press. Evicted tokens are masked and
not removed, so it answers what a cache would that holds the others alone; its size is the byte law's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.ranked import classes_of_kept
from aatc_cli.core.press.seen import Prompt, step_angles
from aatc_cli.core.press.state import PressState
from aatc_cli.runtime.pressed.store import PressPlace, facts_of
from aatc_cli.runtime.softmax import by_head
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.layer import TileLayer
from aatc_cli.runtime.tiles.store import TileStore


class PressedTileStore(TileStore):
    """A store of tiles of b sequences of equal length. ``state`` says which tokens of which head are left."""

    def __init__(self, layer: TileLayer, window: Window, batch: int, dtype: torch.dtype, place: PressPlace) -> None:
        super().__init__(layer, window, batch, dtype)
        self.place = place
        shape = batch, place.heads
        self.state = PressState.empty(place.pressed, window, shape, layer.device, place.layer)

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """A prompt: rotated queries [b, Hq, n, D] and keys [b, H, n, D]."""
        super().watch(query, keys, view)
        angles = step_angles(*view.tables(0, 2))
        self.state.see(Prompt(query, keys, facts_of(view, self.place), angles))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; behind a prompt the press chooses before they are coded."""
        count = self.tokens + int(keys.shape[1])
        self.state.extend(max(count - self.state.tokens, 0))
        if self.state.prompt is not None:
            packed = packed_tokens(count, self.window)
            self.state.settle(packed, self.state.prompt.facts, lambda: by_head(values, self.layer.heads))
        super().append(keys, values)

    def again(self, after: TileStore, keys: Tensor, values: Tensor) -> None:
        """Take again rows of a step that ``after`` has taken whole, with what the press left of a prompt among them."""
        assert isinstance(after, PressedTileStore)
        if not self.tokens:
            self.state = after.state.taken_back(int(keys.shape[1]))
        super().again(after, keys, values)

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones."""
        super().drop(count)
        self.state.drop(count)

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name."""
        return super().tensors() | {"kept": self.state.kept}

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        super().load(tensors, tokens)
        self.state.kept = tensors["kept"]

    def adopt(self, other: TileStore, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of ``other``, with what the press was told."""
        assert isinstance(other, PressedTileStore)
        super().adopt(other, places)
        self.state = other.state.select(torch.tensor(places, device=self.layer.device))

    def alike(self) -> Self:
        """An empty store of the same form and batch."""
        return type(self)(self.layer, self.window, self.batch, self.exact.ring_keys.dtype, self.place)

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """No file holds a simulated cache."""
        return False

    def _tiles(self, rows: Mapping[Side, Tensor], received: Tensor, first: int) -> Tensor:
        if first or not self.state.packed:
            return super()._tiles(rows, received, first)
        # a prompt: all that leaves the window with it, and nothing else, has been chosen from
        if self.state.classes is not None:
            span = slice(self.window.sinks, self.window.sinks + int(received.shape[2]))
            return self.layer.encode_classes(rows, self.state.classes[..., span].clamp_min(0))
        kept = self._kept(self.window.sinks, int(received.shape[2]))
        return self.layer.encode_classes(
            rows, classes_of_kept(self.layer.rule, received, kept, first, self.layer.layer)
        )

    def _gone(self, dropped: Tensor | None, place: int, count: int) -> Tensor | None:
        evicted = ~self._kept(place, count)
        return evicted if dropped is None else evicted | dropped

    def _kept(self, place: int, count: int) -> Tensor:
        return self.state.kept[..., place : place + count]
