"""One layer's packed cache: exact sinks, a ring of recent tokens, and packed streams for all that is between.

Before a token would be the (w + 1)th recent one, the f oldest are packed. Rows enter a stream once, from their exact
values, and are never decoded and coded again. Tensors grow by concatenation, so that no storage is larger than what
`core.layout` counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.layout import packed_tokens
from aatc_cli.runtime.exact import ExactRows
from aatc_cli.runtime.packed.attention import StoredTokens, packed_attention
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.stream import PackedStream
from aatc_cli.runtime.store import LayerView, StoreParts
from aatc_cli.runtime.store_check import fits


class PackedStore(StoreParts):
    """The cache of one layer for b sequences of equal length. Rows are model vectors [b, n, C], keys before RoPE."""

    def __init__(
        self, key_site: SiteCodec, value_site: SiteCodec, window: Window, batch: int, dtype: torch.dtype
    ) -> None:
        self.window, self.batch, self.tokens = window, batch, 0
        device = key_site.plan.order.device
        self.exact = ExactRows(window, torch.empty(batch, 0, key_site.channels, dtype=dtype, device=device))
        self.streams = [PackedStream(key_site, value_site, window.sinks, batch)]

    @property
    def packed(self) -> int:
        """Packed tokens per sequence."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: none before anything is packed."""
        return self.window.sinks + self.packed if self.packed else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the live tensors: there is no spare room."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D]."""
        return packed_attention(query, self.stored(), view, fresh)

    def stored(self) -> StoredTokens:
        """What attention reads."""
        keys, values, first = self.recent()
        sinks = self.exact.sink_keys, self.exact.sink_values
        return StoredTokens(sinks, self.streams, (keys, values), first, self.tokens)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; the state is that of n single appends."""
        free = self.exact.fill_sinks(keys, values, self.tokens)
        before = max(self.tokens - self.window.sinks, 0)
        self.tokens += keys.shape[1]
        keys, values = keys[:, free:], values[:, free:]
        if keys.shape[1]:
            self._pack(keys, values, before)
            self.exact.write(keys, values, before)

    def recent(self) -> tuple[Tensor, Tensor, int]:
        """Exact keys and values [b, n, C] of the recent tokens in order, and the index of the first of them."""
        first, count = self.packed, max(self.tokens - self.window.sinks, 0)
        return *self.exact.between(first, count), self.window.sinks + first

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor by name; they hold all the bytes of this layer."""
        found = self.exact.tensors()
        for index, stream in enumerate(self.streams):
            found |= {f"streams.{index}.{name}": getattr(stream, name) for name in stream.NAMES}
        return found

    def snapshot(self) -> PackedStore:
        """A store in the same state; what is only ever replaced is shared, what is written in place is copied."""
        stream = self.streams[0]
        dtype = self.exact.ring_keys.dtype
        new = PackedStore(stream.key_site, stream.value_site, self.window, self.batch, dtype)
        new.load(self.tensors() | self.exact.frozen(), self.tokens)
        return new

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors`` can be the contents of such a store with ``tokens`` tokens."""
        return fits(self.tensors(), tensors, tokens, self.window)

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        self.exact.load(tensors)
        for index, stream in enumerate(self.streams):
            for name in stream.NAMES:
                setattr(stream, name, tensors[f"streams.{index}.{name}"])

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed."""
        assert self.tokens - count >= self.least
        self.tokens -= count
        self.exact.shorten(self.tokens)

    def _pack(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Pack what the window rule asks for, from the ring and from the new rows behind it."""
        stream, done = self.streams[-1], self.packed
        until = max(packed_tokens(self.tokens, self.window), done)
        if until == done:
            return
        old_keys, old_values = self.exact.between(done, min(until, before))
        fresh = max(until - before, 0)
        stream.append(torch.cat((old_keys, keys[:, :fresh]), 1), torch.cat((old_values, values[:, :fresh]), 1))
