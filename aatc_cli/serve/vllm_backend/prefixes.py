"""Prefixes that requests share: blocks that are full hold a tile at once, and the first tokens of a text stay exact.

A block of the engine may be read by others as soon as it is full, while its own request still holds those tokens
exactly. So it is packed then, and once more when they leave the window, ranked by all that they received. This needs
tiles that are blocks: 64 sinks, which are the first block. Their exact rows are kept for the latest first blocks;
whoever goes on from another one reads its sinks packed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aatc_cli.core.tiles import TILE
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.serve.vllm_backend.numbers import on_device
from aatc_cli.serve.vllm_backend.rows import ExactSlots

# first blocks whose exact rows are kept
KEPT = 32


@dataclass(frozen=True)
class Full:
    """Block number ``index`` of the request in ``slot``, ``block`` of the engine, is full; kept: of a first one."""

    slot: int
    index: int
    block: int
    kept: int = -1


class Prefixes:
    """What is shared by the layers of ``form``; exact rows of first blocks: keys and values [L, KEPT, 64, C]."""

    def __init__(self, form: FusedTilesStatic, exact: ExactSlots) -> None:
        self.form, self.exact = form, exact
        self._places: OrderedDict[int, int] = OrderedDict()
        shape = (len(form.layers), KEPT, TILE, exact.keys.shape[3])
        self.keys, self.values = exact.keys.new_zeros(shape), exact.keys.new_zeros(shape)

    def full(self, slot: int, index: int, block: int) -> Full:
        """Note that a block is full, or will be behind this step; a first one is given a place for its rows."""
        if index:
            return Full(slot, index, block)
        if block not in self._places:
            place = len(self._places) if len(self._places) < KEPT else self._places.popitem(last=False)[1]
            self._places[block] = place
        self._places.move_to_end(block)
        return Full(slot, 0, block, self._places[block])

    def place(self, block: int) -> int | None:
        """Where the exact rows of a first block are kept, if they are."""
        return self._places.get(block)

    def pack(self, layer: int, cache: Tensor, blocks: Sequence[Full]) -> None:
        """Pack blocks that are full of tokens that are still exact, into ``cache`` uint8 [blocks, bytes]."""
        firsts, others = [b for b in blocks if not b.index], [b for b in blocks if b.index]
        if others:
            slots, index = self._numbers([(b.slot, b.index) for b in others])
            self._write(layer, cache, others, self.exact.oldest(layer, slots, (index - 1) * TILE, TILE))
        if firsts:
            slots, places = self._numbers([(b.slot, b.kept) for b in firsts])
            keys, values = self.exact.keys[layer][slots, :TILE], self.exact.values[layer][slots, :TILE]
            self.keys[layer, places], self.values[layer, places] = keys, values
            # nobody asks what sinks receive
            none = self.exact.received.new_zeros(len(firsts), self.exact.heads, TILE)
            self._write(layer, cache, firsts, (keys, values, none))

    def adopt(self, layer: int, cache: Tensor, slot: int, block: int, place: int | None) -> None:
        """Put the rows of a first block into ``slot`` as its sinks: exact ones if they are kept, else as packed."""
        if place is not None:
            keys, values = self.keys[layer, place], self.values[layer, place]
        else:
            coded = self.form.layers[layer].layer
            rows = coded.read(cache[block : block + 1, : coded.held.nbytes][None])
            keys, values = (side[0].transpose(0, 1).flatten(1) for side in (rows.keys, rows.values))
        self.exact.keys[layer, slot, :TILE] = keys.to(self.exact.keys.dtype)
        self.exact.values[layer, slot, :TILE] = values.to(self.exact.values.dtype)

    def _write(self, layer: int, cache: Tensor, blocks: Sequence[Full], rows: tuple[Tensor, Tensor, Tensor]) -> None:
        given: Any = {"k": rows[0], "v": rows[1]}
        tiles = self.form.layers[layer].layer.encode(given, rows[2], 0)
        ids = on_device([each.block for each in blocks], cache.device)
        cache[ids, : tiles.shape[2]] = tiles[:, 0]

    def _numbers(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        first, second = on_device(pairs, self.keys.device).unbind(1)
        return first, second
