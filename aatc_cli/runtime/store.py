"""One layer's compressed cache: exact sinks, a ring of recent tokens, and packed streams for all that is between.

Token t >= s lies in ring slot (t - s) mod w; before a token would be the (w + 1)th recent one, the f oldest are packed.
Rows enter a stream once, from their exact values, and are never decoded and coded again. Tensors grow by
concatenation, so that no storage is larger than what `core.layout` counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.layout import exact_slots, packed_tokens
from aatc_cli.core.scales import pack_scales, unpack_scales
from aatc_cli.runtime.site import SiteCodec

# rows encoded at once when a long prompt is packed, which bounds the float latents alive
_ENCODE_ROWS = 1024


class PackedStream:
    """Tokens ``first`` .. ``first + tokens - 1`` of b sequences in packed form under one pair of codecs.

    keys uint8 [b, P, row_bytes], values uint8 [b, P / f, block_bytes], key_scales and value_scales [b, groups, P] in
    float16, or as codes uint8 of `core.scales`.
    """

    NAMES = ("keys", "values", "key_scales", "value_scales")

    def __init__(self, key_site: SiteCodec, value_site: SiteCodec, first: int, batch: int) -> None:
        self.key_site, self.value_site, self.first = key_site, value_site, first
        device = key_site.plan.order.device
        self.keys = torch.empty(batch, 0, key_site.plan.row_bytes, dtype=torch.uint8, device=device)
        self.values = torch.empty(batch, 0, value_site.plan.block_bytes, dtype=torch.uint8, device=device)
        scales = torch.uint8 if key_site.codec.scale_bits == 8 else torch.float16
        self.key_scales = torch.empty(batch, key_site.groups, 0, dtype=scales, device=device)
        self.value_scales = torch.empty(batch, value_site.groups, 0, dtype=scales, device=device)

    @property
    def tokens(self) -> int:
        """Packed tokens per sequence."""
        return int(self.keys.shape[1])

    @property
    def flush(self) -> int:
        """Tokens per value block."""
        return self.key_site.plan.flush

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Encode exact rows [b, n, C] (n whole flush blocks) and append them."""
        rows = max(self.flush, _ENCODE_ROWS // self.flush * self.flush)
        coded = [self.key_site.encode(part) for part in torch.split(keys, rows, 1)]
        valued = [self.value_site.encode(part) for part in torch.split(values, rows, 1)]
        self.keys = torch.cat([self.keys, *(data for data, _ in coded)], 1)
        self.key_scales = torch.cat([self.key_scales, *(self._held(alpha) for _, alpha in coded)], 2)
        self.values = torch.cat([self.values, *(data for data, _ in valued)], 1)
        self.value_scales = torch.cat([self.value_scales, *(self._held(alpha) for _, alpha in valued)], 2)

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Packed keys, key scales, packed values, value scales of tokens start .. stop - 1, at block boundaries.

        The scales are float16, however they are held.
        """
        blocks = slice(start // self.flush, stop // self.flush)
        tokens = slice(start, stop)
        return (
            self.keys[:, tokens],
            self._read(self.key_scales[..., tokens]),
            self.values[:, blocks],
            self._read(self.value_scales[..., tokens]),
        )

    def _held(self, alpha: Tensor) -> Tensor:
        return pack_scales(alpha) if self.key_scales.dtype == torch.uint8 else alpha

    def _read(self, scales: Tensor) -> Tensor:
        return unpack_scales(scales) if scales.dtype == torch.uint8 else scales


class LayerStore:
    """The cache of one layer for b sequences of equal length. Rows are model vectors [b, n, C], keys before RoPE.

    sink_keys, sink_values [b, min(T, s), C]; ring_keys, ring_values [b, min(T - s, w), C], in the model's dtype.
    """

    NAMES = ("sink_keys", "sink_values", "ring_keys", "ring_values")

    def __init__(
        self, key_site: SiteCodec, value_site: SiteCodec, window: Window, batch: int, dtype: torch.dtype
    ) -> None:
        self.window, self.batch, self.tokens = window, batch, 0
        empty = torch.empty(batch, 0, key_site.channels, dtype=dtype, device=key_site.plan.order.device)
        self.sink_keys, self.sink_values = empty.clone(), empty.clone()
        self.ring_keys, self.ring_values = empty.clone(), empty.clone()
        self.streams = [PackedStream(key_site, value_site, window.sinks, batch)]

    @property
    def packed(self) -> int:
        """Packed tokens per sequence."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: none before anything is packed."""
        return self.window.sinks + self.packed if self.packed else 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens; the state is that of n single appends."""
        free = max(self.window.sinks - self.tokens, 0)
        if free:
            self.sink_keys = torch.cat((self.sink_keys, keys[:, :free]), 1)
            self.sink_values = torch.cat((self.sink_values, values[:, :free]), 1)
        before = max(self.tokens - self.window.sinks, 0)
        self.tokens += keys.shape[1]
        keys, values = keys[:, free:], values[:, free:]
        if keys.shape[1]:
            self._pack(keys, values, before)
            self._write(keys, values, before)

    def recent(self) -> tuple[Tensor, Tensor, int]:
        """Exact keys and values [b, n, C] of the recent tokens in order, and the index of the first of them."""
        first, count = self.packed, max(self.tokens - self.window.sinks, 0)
        return *self._ring(first, count), self.window.sinks + first

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor by name; they hold all the bytes of this layer."""
        found = {name: getattr(self, name) for name in self.NAMES}
        for index, stream in enumerate(self.streams):
            found |= {f"streams.{index}.{name}": getattr(stream, name) for name in stream.NAMES}
        return found

    def select(self, rows: Tensor) -> LayerStore:
        """A store of the sequences ``rows`` (indices, any order, repeats allowed), sharing no memory with this one."""
        new = self.like(int(rows.shape[0]))
        new.tokens = self.tokens
        new.load({name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in self.tensors().items()})
        return new

    def snapshot(self) -> LayerStore:
        """A store in the same state; what is only ever replaced is shared, what is written in place is copied."""
        new = self.like(self.batch)
        new.tokens = self.tokens
        new.load(self.tensors() | {"ring_keys": self.ring_keys.clone(), "ring_values": self.ring_values.clone()})
        return new

    def like(self, batch: int) -> LayerStore:
        """An empty store of the same layer for ``batch`` sequences."""
        stream = self.streams[0]
        return LayerStore(stream.key_site, stream.value_site, self.window, batch, self.ring_keys.dtype)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put the tensors of `tensors` in place; ``tokens`` is the caller's to set."""
        for name in self.NAMES:
            setattr(self, name, tensors[name])
        for index, stream in enumerate(self.streams):
            for name in stream.NAMES:
                setattr(stream, name, tensors[f"streams.{index}.{name}"])

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed."""
        sinks, slots = exact_slots(self.tokens - count, self.window)
        assert self.tokens - count >= self.window.sinks + self.packed or self.packed == 0
        self.tokens -= count
        self.sink_keys, self.sink_values = self.sink_keys[:, :sinks].clone(), self.sink_values[:, :sinks].clone()
        if slots < self.ring_keys.shape[1]:
            self.ring_keys, self.ring_values = self.ring_keys[:, :slots].clone(), self.ring_values[:, :slots].clone()

    def _ring(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        slots = torch.arange(start, stop, device=self.ring_keys.device) % self.window.recent
        return self.ring_keys.index_select(1, slots), self.ring_values.index_select(1, slots)

    def _pack(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Pack what the window rule asks for, from the ring and from the new rows behind it."""
        stream, done = self.streams[-1], self.packed
        until = max(packed_tokens(self.tokens, self.window), done)
        if until == done:
            return
        old_keys, old_values = self._ring(done, min(until, before))
        fresh = max(until - before, 0)
        stream.append(torch.cat((old_keys, keys[:, :fresh]), 1), torch.cat((old_values, values[:, :fresh]), 1))

    def _write(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Write the new rows into the ring, which grows to at most w slots."""
        after = before + keys.shape[1]
        slots = min(after, self.window.recent)
        if slots > self.ring_keys.shape[1]:
            grown = (keys.shape[0], slots, keys.shape[2])
            ring_keys, ring_values = keys.new_empty(grown), values.new_empty(grown)
            ring_keys[:, : self.ring_keys.shape[1]] = self.ring_keys
            ring_values[:, : self.ring_values.shape[1]] = self.ring_values
            self.ring_keys, self.ring_values = ring_keys, ring_values
        first = max(before, after - self.window.recent)
        places = torch.arange(first, after, device=keys.device) % self.window.recent
        self.ring_keys[:, places] = keys[:, first - before :]
        self.ring_values[:, places] = values[:, first - before :]
