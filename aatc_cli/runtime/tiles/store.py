"""One layer's cache in tiles: exact sinks, a ring of recent tokens and what they received, tiles for all between.

Tiles are written once and never changed, so a copy of a cache, a beam or a prefix that several go on from share them by
reference. What attention a recent token receives is summed while it is exact, from its own window alone: of decoded
tokens in `attend`, of a prompt in `watch`. When a tile of tokens leaves the window, its tokens are ranked by it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.received import received_by_head
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.exact import ExactRows
from aatc_cli.runtime.softmax import OnlineSoftmax, by_head
from aatc_cli.runtime.store import LayerView
from aatc_cli.runtime.tiles.layer import TileLayer
from aatc_cli.runtime.tiles.pages import TilePages

# packed tokens in float at once, of all sequences together
_AT_ONCE = 2048
_AT_ONCE_CUDA = 16384


class TileStore:
    """The cache of one layer for b sequences of equal length. Rows are model vectors [b, n, C], keys before RoPE.

    received [b, orders, slots]: what the tokens in the ring have received so far, in float32 at least.
    """

    watches = True

    def __init__(self, layer: TileLayer, window: Window, batch: int, dtype: torch.dtype) -> None:
        assert window.flush == layer.rule.tile
        self.layer, self.window, self.batch, self.tokens = layer, window, batch, 0
        channels = layer.codecs["k"].bits.shape[1]
        self.exact = ExactRows(window, batch, channels, dtype, layer.device)
        self.pages = TilePages(batch)
        wide = torch.promote_types(dtype, torch.float32)
        self.received = torch.zeros(batch, layer.rule.orders(layer.heads), 0, dtype=wide, device=layer.device)
        # of tokens that were attended to before they are appended
        self._ahead: Tensor | None = None

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
        """Bytes of the live tensors, those that several sequences share counted once."""
        return self.exact.nbytes + self.received.nbytes + self.pages.nbytes

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """Told of a prompt that attends to itself alone: rotated query [b, Hq, n, D], keys [b, H, n, D]; then `append`."""
        lags = self.layer.rule.lags(self.window.recent)
        found = received_by_head(
            query, keys, view.scaling, lags, sliding=view.sliding_window, sinks=view.sinks, softcap=view.softcap
        )
        self._ahead = found if self.layer.rule.order == "head" else found.sum(1, keepdim=True)

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D].

        Recent and fresh tokens are told what they receive of it.
        """
        first = self.tokens if fresh is not None else self.tokens - 1
        softmax = OnlineSoftmax(query, self.layer.heads, first, view)
        softmax.rows(self.exact.sink_keys, self.exact.sink_values, 0)
        at_once = (_AT_ONCE_CUDA if query.is_cuda else _AT_ONCE) // query.shape[0] // self.layer.rule.tile
        for start, data in self.pages.parts(max(at_once, 1)):
            place = self.window.sinks + start * self.layer.rule.tile
            count = data.shape[1] * self.layer.rule.tile
            if softmax.sees(place + count - 1):
                rows = self.layer.read(data)
                cos, sin = view.tables(place, count)
                keys = apply_rope(rows.keys, cos[None], sin[None], view.rope)
                softmax.add(keys, rows.values, place, rows.hidden)
        keys, values, place = self.exact.recent(self.packed, self.tokens)
        near = by_head(keys, self.layer.heads)
        if keys.shape[1]:
            cos, sin = view.tables(place, keys.shape[1])
            near = apply_rope(near, cos[None], sin[None], view.rope)
            softmax.add(near, by_head(values, self.layer.heads), place)
        if fresh is not None:
            softmax.add(*fresh, self.tokens)
            near = torch.cat((near, fresh[0].to(near.dtype)), 2)
        out = softmax.result(query.dtype)
        self._note(softmax, near, place, keys.shape[1])
        return out

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; the state is that of n single appends."""
        count, before = keys.shape[1], self.tokens
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = self.received.new_zeros(*self.received.shape[:2], count)
        free = self.exact.fill_sinks(keys, values, before)
        self.tokens += count
        done = self.packed
        until = max(packed_tokens(self.tokens, self.window), done)
        recent = max(before - self.window.sinks, 0)
        keys, values, ahead = keys[:, free:], values[:, free:], ahead[..., free:]
        if until > done:
            slots = self.exact.slots(done, min(until, recent))
            fresh = slice(0, max(until - recent, 0))
            rows = {
                side: torch.cat((ring.index_select(1, slots), new[:, fresh]), 1)
                for side, ring, new in zip(
                    SIDES, (self.exact.ring_keys, self.exact.ring_values), (keys, values), strict=True
                )
            }
            received = torch.cat((self.received.index_select(2, slots), ahead[..., fresh]), 2)
            self.pages.append(self.layer.encode(rows, received, done))
        if keys.shape[1]:
            self._keep(ahead, recent)
            self.exact.write(keys, values, recent)

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed.

        What those tokens had paid to others stays counted: a query is not kept, and its share is not known again.
        """
        assert self.tokens - count >= self.least
        self.tokens -= count
        self.exact.shorten(self.tokens)
        self.received = self.received[..., : self.exact.ring_keys.shape[1]].clone()

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name: exact rows, what they received, and the tiles [b, m, n] of every sequence."""
        return self.exact.tensors() | {"ring_received": self.received, "tiles": self.pages.joined()}

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        self.exact.load(tensors)
        self.received = tensors["ring_received"]
        self.pages = TilePages(self.batch)
        if tensors["tiles"].shape[1]:
            self.pages.append(tensors["tiles"])

    def select(self, places: list[int]) -> TileStore:
        """The sequences at ``places`` in a store of their own, which shares their tiles."""
        new = TileStore(self.layer, self.window, len(places), self.exact.ring_keys.dtype)
        index = torch.tensor(places, device=self.received.device)
        new.tokens, new.pages = self.tokens, self.pages.select(places)
        new.exact.load({name: part.index_select(0, index) for name, part in self.exact.tensors().items()})
        new.received = self.received.index_select(0, index)
        return new

    def snapshot(self) -> TileStore:
        """A store in the same state, which stays as it is whatever this one does."""
        return self.select(list(range(self.batch)))

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors``, of a file, can be the contents of such a store with ``tokens`` tokens."""
        if set(tensors) != {*self.exact.tensors(), "ring_received", "tiles"}:
            return False
        tiles, received = tensors["tiles"], tensors["ring_received"]
        packed = packed_tokens(tokens, self.window) // self.layer.rule.tile
        shape = (*self.received.shape[:2], min(max(tokens - self.window.sinks, 0), self.window.recent))
        # after a crop fewer tokens are left than those that made the cache pack
        return (
            self.exact.fits(tensors, tokens)
            and tiles.dtype == torch.uint8
            and tuple(tiles.shape[::2]) == (self.batch, self.layer.nbytes if tiles.shape[1] else tiles.shape[2])
            and packed <= tiles.shape[1] <= max(tokens - self.window.sinks, 0) // self.layer.rule.tile
            and received.dtype == self.received.dtype
            and tuple(received.shape) == shape
            and bool(torch.isfinite(received).all())
        )

    def _note(self, softmax: OnlineSoftmax, near: Tensor, place: int, recent: int) -> None:
        """Add what the softmax's queries pay the tokens from ``place`` on, whose rotated keys are ``near``."""
        first, last = self.layer.rule.lags(self.window.recent)
        low = max(softmax.first - last - place, 0)
        high = min(softmax.first + softmax.count - 1 - first - place + 1, near.shape[2])
        added = self.received.new_zeros(*self.received.shape[:2], near.shape[2])
        if high > low:
            weights = softmax.shares(near[:, :, low:high], place + low)
            lag = (softmax.first + torch.arange(softmax.count, device=near.device))[:, None] - place
            lag = lag - torch.arange(low, high, device=near.device)
            watched = ((lag >= first) & (lag <= last)).to(weights.dtype)
            by_query = weights.unflatten(2, (-1, softmax.count))
            added[..., low:high] = self.layer.rule.received(by_query, watched).to(added.dtype)
        slots = self.exact.slots(place - self.window.sinks, place - self.window.sinks + recent)
        self.received[..., slots] += added[..., :recent]
        self._ahead = added[..., recent:] if near.shape[2] > recent else None

    def _keep(self, ahead: Tensor, recent: int) -> None:
        """Write what new tokens received into their slots, which grow with the ring's."""
        after = recent + ahead.shape[2]
        slots = min(after, self.window.recent)
        if slots > self.received.shape[2]:
            self.received = torch.nn.functional.pad(self.received, (0, slots - self.received.shape[2]))
        start = max(recent, after - self.window.recent)
        self.received[..., self.exact.slots(start, after)] = ahead[..., start - recent :]
