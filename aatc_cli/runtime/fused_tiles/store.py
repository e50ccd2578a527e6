"""One layer's fused cache of tiles: what the packed one holds, in records, and single queries by a kernel.

Everything but the place of its contents is `runtime.tiles.store`: prompts, chunks of them and candidates of assisted
decoding go by torch, a few tiles at a time; so does all on a CPU, where nothing else is slower than it has to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused_tiles.buffers import PooledTiles, SlotRows, SlotSums
from aatc_cli.runtime.fused_tiles.shared import FusedTiles, FusedTilesShared
from aatc_cli.runtime.kernels.received_rows import prompt_kernels, received_of
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.store import TileStore


class FusedTileStore(TileStore):
    """The cache of one layer for the sequences of ``shared``, of at most ``room`` tokens where that is given."""

    exact: SlotRows
    pages: PooledTiles
    received: SlotSums

    def __init__(self, shared: FusedTilesShared, place: int, batch: int, room: int | None) -> None:
        form = shared.form
        self.shared, self.place, self.room = shared, place, room
        self.fused: FusedTiles = form.layers[place]
        super().__init__(self.fused.layer, form.window, batch, form.dtype)
        device = self.layer.device
        self.exact = SlotRows(form.window, self.exact.ring_keys)
        tiles = max(packed_tokens(room, form.window) // self.layer.rule.tile, 1) if room is not None else 1
        self.pages = PooledTiles(batch, self.layer.held.nbytes, tiles, room is not None, device)
        self.received = SlotSums(form.window, self.received.sums)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, empty slots and room to spare included."""
        return self.exact.nbytes + self.received.held.nbytes + self.pages.nbytes

    @property
    def full(self) -> bool:
        """Whether the next token would be written over one that is not packed."""
        return self.tokens - self.window.sinks - self.packed >= self.window.recent

    def check_room(self, tokens: int) -> None:
        """Raise `AatcError` for more tokens than a room that was asked for."""
        if self.room is not None and tokens > self.room:
            raise AatcError(f"{tokens} tokens are more than the capacity of {self.room}", "make a larger cache")

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; raises `AatcError` beyond a room that was asked for."""
        if self.shared.steady:
            self.tokens += 1
            self.shared.write(self.place, self.exact, self.received, keys, values)
            return
        self.check_room(self.tokens + int(keys.shape[1]))
        super().append(keys, values)

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """As of packed tiles, and by a kernel where there is one for such a prompt."""
        if view.sums is None or prompt_kernels(query) is None:
            super().watch(query, keys, view)
            return
        lags, per_head = self.layer.rule.lags(self.window.recent), self.layer.rule.order == "head"
        rows = zip(query.transpose(1, 2), keys.transpose(1, 2), view.sums.float(), strict=True)
        found = torch.cat([received_of(q, k, sums, view.scaling, lags, 0) for q, k, sums in rows])
        self.received.prompt(found if per_head else found.sum(1, keepdim=True))

    def flush(self) -> None:
        """Pack the oldest tile of tokens of the window."""
        done, rows = self.packed, {}
        until = done + self.layer.rule.tile
        rows["k"], rows["v"] = self.exact.between(done, until)
        known = self.received.sums.index_select(2, self.exact.slots(done, until))
        self.pages.append(self.layer.encode(rows, known, done))  # type: ignore[arg-type]

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D]."""
        if fresh is not None or query.shape[2] != 1 or not self.shared.compiled:
            return super().attend(query, view, fresh)
        order, heads = self.fused.order, self.layer.heads
        newest, keys = query[:, :, 0], self.exact.keys
        if order is not None:
            newest = newest[..., order]
            keys = torch.unflatten(keys, -1, (heads, -1))[..., order].flatten(-2)
        if not self.shared.steady:
            self.shared.move(self.tokens, self.pages.count, self.pages.capacity, view.offset)
        rows = keys, self.exact.values
        if self.shared.steady and self.shared.paid is not None:
            paid = self.shared.paid[self.place]
        else:
            paid = torch.zeros(self.batch, heads, keys.shape[1], dtype=torch.float32, device=query.device)
        out = self.shared.decode(newest.contiguous(), self.pages, self.fused, rows, view.scaling, paid)
        self._pay(paid[..., self.window.sinks :])
        return out.unsqueeze(2)

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed."""
        super().drop(count)
        self.received.show(self.exact.ring_keys.shape[1])

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        self.exact.load(tensors)
        self.received.load(tensors["ring_received"])
        self.pages.count = 0
        self.pages.append(tensors["tiles"])

    def adopt(self, other: TileStore, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of ``other`` in tensors of its own."""
        assert isinstance(other, FusedTileStore)
        index = torch.tensor(places, device=self.layer.device)
        self.exact.load({name: part.index_select(0, index) for name, part in other.exact.tensors().items()})
        self.received.load(other.received.sums.index_select(0, index))
        self.tokens, self.pages = other.tokens, other.pages.select(places)

    def alike(self) -> Self:
        """An empty store of the same form and batch."""
        return type(self)(self.shared, self.place, self.batch, self.room)

    def _pay(self, by_slot: Tensor) -> None:
        """Add what a query paid the tokens of the ring: [b, H, w]."""
        shares = by_slot if self.layer.rule.order == "head" else by_slot.sum(1, keepdim=True)
        done, count = self.packed, max(self.tokens - self.window.sinks, 0)
        if self.received.taken is None:
            self.received.held += shares
        elif count > done:
            self.received.paid(done, shares[..., self.exact.slots(done, count)], count - done)
