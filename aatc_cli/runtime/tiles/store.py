"""One layer's cache in tiles: exact sinks, a ring of recent tokens and what they received, tiles for all between.

Tiles are written once and never changed, so a copy of a cache, a beam or a prefix that several go on from share them by
reference. What attention a recent token receives is summed while it is exact: of decoded tokens in `attend`, of a
prompt in `watch`. When a tile of tokens leaves the window, its tokens are ranked by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import exact_slots, packed_tokens
from aatc_cli.core.received import received_by_head, received_near
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.exact import ExactRows
from aatc_cli.runtime.softmax import OnlineSoftmax, by_head
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.layer import TileLayer, TileRows
from aatc_cli.runtime.tiles.pages import TilePages
from aatc_cli.runtime.tiles.received import Received

# packed tokens in float at once, of all sequences together
_AT_ONCE = 2048
_AT_ONCE_CUDA = 16384


class TileStore:
    """The cache of one layer for b sequences of equal length. Rows are model vectors [b, n, C], keys before RoPE."""

    sums = True

    def __init__(self, layer: TileLayer, window: Window, batch: int, dtype: torch.dtype) -> None:
        self.layer, self.window, self.batch, self.tokens = layer, window, batch, 0
        self.exact = ExactRows(window, torch.empty(batch, 0, layer.channels, dtype=dtype, device=layer.device))
        self.pages = TilePages(batch)
        orders = layer.rule.orders(layer.heads)
        # sums of many small numbers
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.received = Received(window, torch.zeros(batch, orders, 0, dtype=wide, device=layer.device))

    @property
    def packed(self) -> int:
        """Packed tokens per sequence."""
        return self.pages.count * self.layer.rule.tile

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: none before anything is packed."""
        return self.window.sinks + self.packed if self.packed else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the live tensors, tiles that several sequences share counted once."""
        rows = sum(tensor.nbytes for tensor in self.exact.tensors().values())
        return rows + self.received.sums.nbytes + self.pages.nbytes

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """See what the tokens of a prompt receive of one another: query [b, Hq, n, D], keys [b, H, n, D], rotated."""
        lags = self.layer.rule.lags(self.window.recent)
        if view.sums is not None:
            found = received_near(query, keys, view.sums, view.scaling, lags)
        else:
            found = received_by_head(
                query, keys, view.scaling, lags, sliding=view.sliding_window, sinks=view.sinks, softcap=view.softcap
            )
        self.received.prompt(found if self.layer.rule.order == "head" else found.sum(1, keepdim=True))

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D].

        Recent and fresh tokens are told what they receive of it.
        """
        softmax = OnlineSoftmax(query, self.layer.heads, self.tokens if fresh is not None else self.tokens - 1, view)
        softmax.rows(self.exact.sink_keys, self.exact.sink_values, 0)
        self._add_tiles(softmax, view, query)
        done, count = self.packed, max(self.tokens - self.window.sinks, 0)
        keys, values = self.exact.between(done, count)
        near = by_head(keys, self.layer.heads)
        if near.shape[2]:
            near = self._rotated(near, view, self.window.sinks + done)
            softmax.add(near, by_head(values, self.layer.heads), self.window.sinks + done)
        # nobody asks what sinks receive, which may be among the fresh tokens
        skipped = max(self.window.sinks - self.tokens, 0)
        if fresh is not None:
            softmax.add(*fresh, self.tokens)
            near = torch.cat((near, fresh[0][:, :, skipped:].to(near.dtype)), 2)
        out = softmax.result(query.dtype)
        if near.shape[2]:
            shares = self._shares(softmax, near, self.window.sinks + done)
            self.received.paid(done, torch.nn.functional.pad(shares, (skipped, 0)), count - done)
        return out

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; the state is that of n single appends."""
        ahead = self.received.next(keys.shape[1])
        free = self.exact.fill_sinks(keys, values, self.tokens)
        before = max(self.tokens - self.window.sinks, 0)
        self.tokens += keys.shape[1]
        keys, values, ahead = keys[:, free:], values[:, free:], ahead[..., free:]
        if not keys.shape[1]:
            return
        done = self.packed
        until = max(packed_tokens(self.tokens, self.window), done)
        if until > done:
            fresh = slice(0, max(until - before, 0))
            old = self.exact.between(done, min(until, before))
            rows = {
                side: torch.cat((held, new[:, fresh]), 1)
                for side, held, new in zip(SIDES, old, (keys, values), strict=True)
            }
            known = self.received.sums.index_select(2, self.exact.slots(done, min(until, before)))
            self.pages.append(self._tiles(rows, torch.cat((known, ahead[..., fresh]), 2), done))
        self.received.write(ahead, before)
        self.exact.write(keys, values, before)

    def again(self, after: TileStore, keys: Tensor, values: Tensor) -> None:
        """Take again rows [b, n, C] of a step that ``after`` has taken whole, with what their queries paid in it."""
        done = 0
        for step in after.received.taken or ():
            if done + step.count > keys.shape[1]:
                break
            rows = slice(done, done + step.count)
            self.received.begin(step)
            self.append(keys[:, rows], values[:, rows])
            self.received.end(step)
            done += step.count
        if done < keys.shape[1]:
            self.append(keys[:, done:], values[:, done:])

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed.

        What their queries paid to others stays counted: it was not written down, as it is for steps that are recorded.
        """
        assert self.tokens - count >= self.least
        self.tokens -= count
        self.exact.shorten(self.tokens)
        self.received.sums = self.received.sums[..., : self.exact.ring_keys.shape[1]].clone()

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name: exact rows, what they received, and the tiles [b, m, n] of every sequence."""
        tiles = self.pages.joined(self.layer.empty_tiles(self.batch))
        return self.exact.tensors() | {"ring_received": self.received.sums, "tiles": tiles}

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        self.exact.load(tensors)
        self.received.sums = tensors["ring_received"]
        self.pages = TilePages(self.batch)
        if tensors["tiles"].shape[1]:
            self.pages.append(tensors["tiles"])

    def adopt(self, other: TileStore, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of ``other``: exact rows are copied, tiles shared."""
        index = torch.tensor(places, device=self.layer.device)
        self.exact.load({name: part.index_select(0, index) for name, part in other.exact.tensors().items()})
        self.received.sums = other.received.sums.index_select(0, index)
        self.tokens, self.pages = other.tokens, other.pages.select(places)

    def snapshot(self) -> Self:
        """A store in the same state, which stays as it is whatever this one does; this one writes down its steps."""
        new = self.alike()
        new.adopt(self, range(self.batch))
        self.received.taken = []
        return new

    def alike(self) -> Self:
        """An empty store of the same form and batch."""
        return type(self)(self.layer, self.window, self.batch, self.exact.ring_keys.dtype)

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors``, of a file, can be the contents of such a store with ``tokens`` tokens."""
        mine = self.tensors()
        if tensors.keys() != mine.keys() or any(tensors[name].dtype != mine[name].dtype for name in mine):
            return False
        sinks, slots = exact_slots(tokens, self.window)
        tiles, rule = int(tensors["tiles"].shape[1]) if tensors["tiles"].dim() == 3 else -1, self.layer.rule.tile
        # a crop leaves more tiles than the window rule asks for
        if not packed_tokens(tokens, self.window) <= tiles * rule <= tokens - sinks:
            return False
        sizes = {name: (1, sinks if name.startswith("sink") else slots) for name in mine}
        sizes |= {"ring_received": (2, slots), "tiles": (1, tiles)}
        for name, (axis, size) in sizes.items():
            shape = [*mine[name].shape[:axis], size, *mine[name].shape[axis + 1 :]]
            if list(tensors[name].shape) != shape:
                return False
        exact = [part for name, part in tensors.items() if name != "tiles"]
        return all(bool(torch.isfinite(part).all()) for part in exact) and bool((tensors["ring_received"] >= 0).all())

    def _tiles(self, rows: Mapping[Side, Tensor], received: Tensor, first: int) -> Tensor:
        """Tiles [b, m, n] of the next tokens that leave the window, as `TileLayer.encode` has them."""
        return self.layer.encode(rows, received, first)

    def _gone(self, dropped: Tensor | None, place: int, count: int) -> Tensor | None:
        """Of ``count`` packed tokens from ``place`` on those that a head does not see, ``dropped`` [b, H, n] first."""
        return dropped

    def packed_rows(self, first: int, last: int) -> TileRows:
        """Packed tokens ``first`` to ``last`` behind the sinks, both at the edge of a tile, keys before RoPE."""
        tile = self.layer.rule.tile
        tiles = self.pages.joined(self.layer.empty_tiles(self.batch))
        return self.layer.read(tiles[:, first // tile : last // tile])

    def _add_tiles(self, softmax: OnlineSoftmax, view: LayerView, query: Tensor) -> None:
        """Take in all packed tokens, some tiles at a time."""
        tile = self.layer.rule.tile
        at_once = (_AT_ONCE_CUDA if query.is_cuda else _AT_ONCE) // query.shape[0] // tile
        for start, data in self.pages.parts(max(at_once, 1)):
            place, count = self.window.sinks + start * tile, data.shape[1] * tile
            if softmax.sees(place + count - 1):
                rows = self.layer.read(data)
                softmax.add(
                    self._rotated(rows.keys, view, place), rows.values, place, self._gone(rows.dropped, place, count)
                )

    def _rotated(self, keys: Tensor, view: LayerView, place: int) -> Tensor:
        cos, sin = view.tables(place, keys.shape[2])
        return apply_rope(keys, cos[None], sin[None], view.rope)

    def _shares(self, softmax: OnlineSoftmax, near: Tensor, place: int) -> Tensor:
        """What the queries pay the tokens from ``place`` on, whose rotated keys are ``near``: [b, orders, n]."""
        first, last = self.layer.rule.lags(self.window.recent)
        low = max(softmax.first - last - place, 0)
        high = min(softmax.first + softmax.count - first - place, near.shape[2])
        found = self.received.sums.new_zeros(*self.received.sums.shape[:2], near.shape[2])
        if high > low:
            weights = torch.unflatten(softmax.shares(near[:, :, low:high], place + low), 2, (-1, softmax.count))
            queries = softmax.first + torch.arange(softmax.count, device=near.device)
            lag = queries[:, None] - place - torch.arange(low, high, device=near.device)
            watched = ((lag >= first) & (lag <= last)).to(weights.dtype)
            found[..., low:high] = self.layer.rule.received(weights, watched)
        return found
