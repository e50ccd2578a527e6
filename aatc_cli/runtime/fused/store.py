"""One layer's fused cache: exact rows in slots of their own, everything older in tiles of 64 tokens.

Slots are the sinks and then a ring. Single tokens go through the kernels on a GPU; prompts, candidates and what follows
a step back are written by torch. Tiles have room to spare, or the room that was asked for and no more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import exact_slots, packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused.reference import decode_attention, head_vectors, unpack_tiles
from aatc_cli.runtime.fused.shared import FusedShared
from aatc_cli.runtime.kernels.decode import DecodeCall
from aatc_cli.runtime.kernels.encode import tiles_of
from aatc_cli.runtime.softmax import OnlineSoftmax
from aatc_cli.runtime.store import LayerView, StoreParts
from aatc_cli.runtime.store_check import alike, shaped

# tiles of a prompt that are encoded at once, and of a history that are decoded at once
_CHUNK = 32
# tiles that a store without a fixed room has more than it needs, at least, and as a share
_SPARE, _SHARE = 8, 8


class FusedStore(StoreParts):
    """The cache of the layer at ``place`` for the sequences of ``shared``. Rows are [b, n, C], keys before RoPE.

    data uint8 [b, max_tiles, tile_bytes]; keys, values [b, slots, C] in the model's dtype.
    """

    def __init__(self, shared: FusedShared, place: int, room: int | None) -> None:
        self.shared, self.place, self.room = shared, place, room
        self.tokens = self.packed = 0
        form, batch = shared.form, shared.batch
        self.layer, self.window = form.layers[place], form.window
        device = form.frequencies.device
        shape = (batch, shared.max_tiles, self.layer.tables.tile_bytes)
        self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        exact = (batch, form.slots, form.channels)
        self.keys, self.values = (torch.zeros(exact, dtype=form.dtype, device=device) for _ in SIDES)

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: none before anything is packed."""
        return self.window.sinks + self.packed if self.packed else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, tiles without tokens and empty slots included."""
        return self.data.nbytes + self.keys.nbytes + self.values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows of the next n tokens; the state is that of n single appends."""
        count = int(keys.shape[1])
        rule = packed_tokens(self.tokens, self.window)
        packed = max(packed_tokens(self.tokens + count, self.window), self.packed)
        self.reserve(self.tokens + count)
        kernels = self.shared.kernels
        # the kernel packs by the count alone: not where a step back has left packed what the rule would pack again
        if count == 1 and kernels is not None and self.tokens and rule == self.packed:
            self.shared.move(self.tokens + 1, packed)
            rows = keys[:, 0].contiguous(), values[:, 0].contiguous()
            tables, encode = self.layer.tables, self.layer.encode
            kernels.append(*rows, self.keys, self.values, self.data, tables, encode, self.shared.tokens)
        else:
            self._pack(keys, values, packed)
            self._write(keys, values, packed)
        self.tokens, self.packed = self.tokens + count, packed

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens; raises `AatcError` beyond a room that was asked for."""
        if self.room is not None and tokens > self.room:
            raise AatcError(f"{tokens} tokens are more than the capacity of {self.room}", "make a larger cache")
        self._hold(packed_tokens(tokens, self.window) // TILE)

    def _hold(self, needed: int) -> None:
        """Make room for as many tiles, and for some more of a store that grows."""
        held = int(self.data.shape[1])
        if needed > held:
            held = max(self.shared.max_tiles, needed + max(needed // _SHARE, _SPARE))
            data = self.data.new_zeros(self.data.shape[0], held, self.data.shape[2])
            data[:, : self.data.shape[1]] = self.data
            self.data = data
        if held > self.shared.max_tiles:
            self.shared.grow(held)

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and ``fresh`` tokens. -> [b, Hq, q, D]."""
        shared = self.shared
        if fresh is not None or (shared.kernels is None and view.offset):
            return self._attend_rows(query, view, fresh)
        shared.move(self.tokens, self.packed)
        newest = query[:, :, 0].contiguous()
        if shared.kernels is None:
            out = self._attend_twin(newest).to(query.dtype)
        else:
            shared.turn(view.offset)
            tables, rows = self.layer.tables, (self.keys, self.values)
            call = DecodeCall(newest, self.data, tables, shared.turns(self.place), rows, shared.counters)
            out = shared.kernels.decode(call, torch.empty_like(newest))
        return out.unsqueeze(2)

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed."""
        assert self.tokens - count >= self.least
        self.tokens -= count

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name, without room to spare."""
        sinks, slots = exact_slots(self.tokens, self.window)
        held = {"tiles": self.data[:, : self.packed // TILE]}
        for name, rows in (("keys", self.keys), ("values", self.values)):
            first = self.window.sinks
            held[name] = torch.cat((rows[:, :sinks], rows[:, first : first + slots]), 1)
        return held

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        sinks, slots = exact_slots(tokens, self.window)
        tiles = int(tensors["tiles"].shape[1])
        self.reserve(tokens)
        # a step back leaves more packed than the rule asks for
        self._hold(tiles)
        self.tokens, self.packed = tokens, tiles * TILE
        self.data[:, :tiles] = tensors["tiles"]
        for name, rows in (("keys", self.keys), ("values", self.values)):
            rows[:, :sinks] = tensors[name][:, :sinks]
            rows[:, self.window.sinks : self.window.sinks + slots] = tensors[name][:, sinks:]

    def snapshot(self) -> FusedStore:
        """A store in the same state; tiles are written behind it alone, exact rows are copied."""
        new = copy.copy(self)
        new.keys, new.values = self.keys.clone(), self.values.clone()
        return new

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors`` can be the contents of such a store with ``tokens`` tokens."""
        empty = self.tensors()
        if not alike(empty, tensors):
            return False
        sinks, slots = exact_slots(tokens, self.window)
        packed = TILE * int(tensors["tiles"].shape[1])
        if not packed_tokens(tokens, self.window) <= packed <= tokens - sinks:
            return False
        return shaped(empty, tensors, {"tiles": packed // TILE, "keys": sinks + slots, "values": sinks + slots})

    def _attend_twin(self, query: Tensor) -> Tensor:
        shared, form = self.shared, self.shared.form
        return decode_attention(
            query,
            self.data,
            self.layer.tables,
            form.frequencies,
            (self.keys, self.values),
            shared.counters,
            sinks=self.window.sinks,
            scaling=form.scaling,
        )

    def _attend_rows(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """The same for several queries: tiles are decoded a few at a time."""
        sinks, form = self.window.sinks, self.shared.form
        first = self.tokens if fresh is not None else self.tokens - 1
        softmax = OnlineSoftmax(query, form.kv_heads, first, view)
        held = min(self.tokens, sinks)
        softmax.rows(self.keys[:, :held], self.values[:, :held], 0)
        for tile in range(0, self.packed // TILE, _CHUNK):
            stop = min(tile + _CHUNK, self.packed // TILE)
            softmax.rows(*self._decoded(tile, stop, softmax.query.dtype), sinks + tile * TILE)
        recent = self._slots(self.packed, max(self.tokens - sinks, 0))
        softmax.rows(self.keys[:, recent], self.values[:, recent], sinks + self.packed)
        if fresh is not None:
            softmax.add(*fresh, self.tokens)
        return softmax.result(query.dtype)

    def _decoded(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values [b, n, C] of tiles ``start`` .. ``stop`` - 1."""
        tables, keys, values = self.layer.tables, [], []
        for row in range(self.data.shape[0]):
            heads: tuple[list[Tensor], list[Tensor]] = ([], [])
            for head in range(len(tables.keys)):
                codes_k, codes_v, alpha_k, alpha_v = unpack_tiles(self.data[row, start:stop], tables, head)
                heads[0].append(head_vectors(codes_k, alpha_k, tables.keys[head]))
                heads[1].append(head_vectors(codes_v, alpha_v, tables.values[head]))
            keys.append(torch.cat(heads[0], 1))
            values.append(torch.cat(heads[1], 1))
        return torch.stack(keys).to(dtype), torch.stack(values).to(dtype)

    def _slots(self, start: int, stop: int) -> Tensor:
        """Slots of the ring in which tokens ``start`` .. ``stop`` - 1 behind the sinks lie."""
        places = torch.arange(start, stop, device=self.keys.device)
        return self.window.sinks + places % self.window.recent

    def _pack(self, keys: Tensor, values: Tensor, packed: int) -> None:
        """Put the tokens up to ``packed`` behind the sinks into tiles, from the ring and from the new rows."""
        if packed == self.packed:
            return
        before = self.tokens - self.window.sinks
        slots = self._slots(self.packed, min(packed, max(before, 0)))
        fresh = slice(max(self.packed - before, 0), max(packed - before, 0))
        rows: dict[Side, Tensor] = {
            "k": torch.cat((self.keys[:, slots], keys[:, fresh]), 1),
            "v": torch.cat((self.values[:, slots], values[:, fresh]), 1),
        }
        step, first = _CHUNK * TILE, self.packed // TILE
        for row in range(keys.shape[0]):
            for start in range(0, packed - self.packed, step):
                part = {side: rows[side][row, start : start + step] for side in SIDES}
                new = tiles_of(part, self.layer.codecs, self.layer.tables)
                place = first + start // TILE
                self.data[row, place : place + new.shape[0]] = new

    def _write(self, keys: Tensor, values: Tensor, packed: int) -> None:
        """Write the new rows that stay exact into their slots."""
        sinks, count = self.window.sinks, int(keys.shape[1])
        free = min(max(sinks - self.tokens, 0), count)
        first = max(self.tokens - sinks, packed, 0)
        slots = self._slots(first, max(self.tokens + count - sinks, first))
        skipped = count - int(slots.numel())
        for rows, held in ((keys, self.keys), (values, self.values)):
            held[:, self.tokens : self.tokens + free] = rows[:, :free]
            if slots.numel():
                held[:, slots] = rows[:, skipped:]
