"""What the backend keeps of one model in an engine: exact rows, lengths, and what a step does before its first layer.

The engine's blocks hold tiles only. A tile is packed when its tokens leave the window: of a prompt by the layer itself,
of a decoding request here, between two steps, so that a captured step never depends on a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.store import LayerView
from aatc_cli.serve.vllm_backend.decoding import Decoding
from aatc_cli.serve.vllm_backend.numbers import on_device
from aatc_cli.serve.vllm_backend.packing import Oldest, Packing
from aatc_cli.serve.vllm_backend.places import Held, Places
from aatc_cli.serve.vllm_backend.prefixes import Full, Prefixes
from aatc_cli.serve.vllm_backend.prompts import attend_chunk
from aatc_cli.serve.vllm_backend.rows import ExactSlots
from aatc_cli.serve.vllm_backend.slots import SlotStore
from aatc_cli.serve.vllm_backend.step import Prompt, Step
from aatc_cli.serve.vllm_backend.turning import Turning


class TileEngine:
    """The caches of plan ``name`` for an engine's requests; ``caches``: its blocks uint8 [blocks, bytes] by layer.

    shared: whether requests go on from full blocks of others, which needs a window of as many sinks as a block has.
    """

    def __init__(
        self, name: str, form: FusedTilesStatic, turning: Turning, scaling: float, slots: int, shared: bool
    ) -> None:
        self.name, self.form, self.turning, self.places = name, form, turning, Places(slots, name)
        device, like = form.frequencies.device, torch.empty(0, dtype=form.dtype, device=form.frequencies.device)
        shape = (form.layers[0].layer.heads, form.dim)
        self.exact = ExactSlots(len(form.layers), slots, form.window, shape, like)
        self.decoding, self.packing = Decoding(form, self.exact, scaling, name), Packing(form, self.exact)
        self.view = LayerView(scaling, turning.tables)
        # of the rows that decode: where they are written, and what takes the rotation off, read by captured steps
        spare = torch.full((slots,), slots, device=device), torch.zeros(slots, dtype=torch.int64, device=device)
        self.rows, self.sums = self.exact.places(spare[1], spare[0])
        self.back = turning.back(spare[1])
        # with shared prefixes the first block holds the sinks, and tiles begin in the second
        self.prefixes = Prefixes(form, self.exact) if shared else None
        self.first = int(shared)
        self.pending: tuple[Full, ...] = ()
        self.order: dict[str, int] = {}
        self.caches: list[Tensor] = []
        # how often somebody went on from blocks of another
        self.joined = 0

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a block, by layer: those of a tile, in whole bytes a token."""
        tile = self.form.layers[0].layer.rule.tile
        return [-(-fused.layer.held.nbytes // tile) * tile for fused in self.form.layers]

    @property
    def recent(self) -> int:
        """Tokens of the window."""
        return self.form.window.recent

    def forget(self, finished: Sequence[str], preempted: Sequence[str], order: Sequence[str] = ()) -> None:
        """Requests that ended, and those that lost their blocks and will come again; ``order``: of the next batch.

        In that order requests were scheduled: one that goes on from another's blocks stands behind it. Raises
        `AatcError` where answers of a step before are known to be no numbers.
        """
        self.decoding.sound.check()
        self._settle()
        self.places.take(preempted)
        self.places.release(finished)
        self.order = {request: place for place, request in enumerate(order)}

    def begin(self, requests: Sequence[tuple[str, int, int]], blocks: Tensor, host: Any) -> Step:
        """Begin a step of ``requests`` (id, cached tokens, new tokens), the rows of ``blocks`` int32 [B, n] in order.

        host [B, n]: the same table on the CPU. Raises `AatcError` where cached tokens are not those that were seen.
        """
        self._settle()
        self.places.release(request for request, cached, _ in requests if not cached)
        joining = {request for request, cached, _ in requests if cached and request not in self.places.held}
        self.joined += len(joining)
        mixed = any(new != 1 for _, _, new in requests)
        # who joins beside prompts may read what one of them writes in this step, so it is treated as one
        late = (row for row, (name, _, new) in enumerate(requests) if new != 1 or (mixed and name in joining))
        decoding = next(late, len(requests))
        ids = [request for request, _, _ in requests]
        self.exact.move(self.places.arrange(ids[:decoding], ids[decoding:]))
        for request, cached, _ in requests:
            self.places.recognise(request, cached, shared=self.prefixes is not None)
        self._join([(row, name) for row, name in enumerate(ids[:decoding]) if name in joining], host)
        self._make_way(ids[:decoding], host)
        rows = [self.places.held[request] for request in ids[:decoding]]
        self._decode_rows(rows)
        full = tuple(each for row, held in enumerate(rows) for each in self._filled(held, held.tokens - 1, host[row]))
        step = Step(decoding, blocks[:, self.first :], full=full if mixed else ())
        self.pending = () if mixed else full
        ends = list(accumulate(new for _, _, new in requests))
        for row in sorted(range(decoding, len(ids)), key=lambda row: (self.order.get(ids[row], row), row)):
            held = self.places.held[ids[row]]
            step.prompts.append(self._prompt(held, ends[row], requests[row][2], host[row], ids[row] in joining))
        return step

    def idle(self, batch: int, blocks: Tensor) -> Step:
        """A step that changes nothing, of ``batch`` rows that decode: what is captured, or only warms up."""
        if batch:
            self.decoding.prepare(batch, self.page_bytes, blocks)
        self._decode_rows([])
        return Step(batch, blocks[:, self.first :])

    def warm_up(self) -> None:
        """Capture what is packed by between steps, once the caches are where they stay."""
        self.packing.prepare(self.caches)

    def attend(self, layer: int, rows: tuple[Tensor, Tensor, Tensor], cache: Tensor, step: Step, out: Tensor) -> Tensor:
        """Attention of a layer over rotated queries [n, Hq, D], keys and values [n, H, D] of the batch; they are kept.

        -> ``out`` [n, Hq, D], zero where a row belongs to no request.
        """
        query, keys, values = rows
        count = step.decoding
        out[max(count, *(prompt.stop for prompt in step.prompts), 0) :] = 0
        if count:
            places, back = (self.rows[:count], self.sums[:count]), (self.back[0][:count], self.back[1][:count])
            self.exact.write(layer, (keys[:count], values[:count]), back, places)
            self.decoding(layer, query[:count], cache, step.blocks, out[:count])
        if step.full and self.prefixes is not None:
            self.prefixes.pack(layer, cache, step.full)
        for prompt in step.prompts:
            mine = slice(prompt.start, prompt.stop)
            self._attend_prompt(layer, (query[mine], keys[mine], values[mine]), cache, prompt, out[mine])
        return out

    def _attend_prompt(
        self, layer: int, rows: tuple[Tensor, Tensor, Tensor], cache: Tensor, prompt: Prompt, out: Tensor
    ) -> None:
        if prompt.sinks is not None and self.prefixes is not None:
            self.prefixes.adopt(layer, cache, prompt.slot, *prompt.sinks)
        store = SlotStore(self.form, self.exact, layer, cache, prompt)
        attend_chunk(store, rows, prompt.back, self.view, out)
        if prompt.full and self.prefixes is not None:
            self.prefixes.pack(layer, cache, prompt.full)

    def _join(self, rows: Sequence[tuple[int, str]], host: Any) -> None:
        """Give single tokens that go on from a shared prefix its sinks."""
        for row, request in rows:
            if self.prefixes is not None:
                block, slot = int(host[row][0]), self.places.held[request].slot
                for layer, cache in enumerate(self.caches):
                    self.prefixes.adopt(layer, cache, slot, block, self.prefixes.place(block))

    def _settle(self) -> None:
        """Pack blocks that the step before has filled."""
        if self.pending and self.prefixes is not None:
            for layer, cache in enumerate(self.caches):
                self.prefixes.pack(layer, cache, self.pending)
        self.pending = ()

    def _filled(self, held: Held, before: int, table: Any) -> list[Full]:
        """Blocks of a request that are full behind this step and were not before, and whose tokens are all exact."""
        if self.prefixes is None:
            return []
        new = (index for index in range(before // TILE, held.tokens // TILE) if not 0 < index <= held.tiles)
        return [self.prefixes.full(held.slot, index, int(table[index])) for index in new]

    def _prompt(self, held: Held, stop: int, new: int, table: Any, joins: bool) -> Prompt:
        """The chunk of a prompt; the request is counted on to what it will be behind the last layer."""
        before, packed = held.tokens, held.tiles
        tile, device = self.form.layers[0].layer.rule.tile, self.form.frequencies.device
        held.tokens += new
        held.tiles = max(packed_tokens(held.tokens, self.form.window) // tile, packed)
        positions = torch.arange(before, held.tokens, device=device)
        blocks = on_device(table[self.first : self.first + held.tiles], device)
        back, full = self.turning.back(positions), tuple(self._filled(held, before, table))
        sinks = None
        if joins and self.prefixes is not None:
            sinks = int(table[0]), self.prefixes.place(int(table[0]))
        return Prompt(stop - new, stop, held.slot, before, packed, blocks, back, full, sinks)

    def _decode_rows(self, held: Sequence[Held]) -> None:
        """Tell the device what a step of single tokens needs: lengths with the new token, places, rotations."""
        slots, count = self.exact.slots, len(held)
        for each in held:
            each.tokens += 1
        idle = slots - count
        self.decoding.sound.expect([each.tokens for each in held])
        numbers = [
            [each.tokens for each in held] + [0] * idle,
            [each.tiles for each in held] + [0] * idle,
            [each.slot for each in held] + [slots] * idle,
        ]
        tokens, tiles, places = on_device(numbers, self.rows.device)
        self.decoding.tokens[:slots], self.decoding.tiles[:slots] = tokens, tiles
        newest = (tokens - 1).clamp(min=0)
        for kept, found in zip((self.rows, self.sums), self.exact.places(newest, places), strict=True):
            kept.copy_(found)
        for kept, found in zip(self.back, self.turning.back(newest), strict=True):
            kept.copy_(found)

    def _make_way(self, decoding: Sequence[str], host: Any) -> None:
        """Pack the oldest tile of every decoding request whose next token would be written over it."""
        tile, window = self.form.layers[0].layer.rule.tile, self.form.window
        full = [
            (row, held)
            for row, held in enumerate(self.places.held[request] for request in decoding)
            if held.tokens - window.sinks - tile * held.tiles >= window.recent
        ]
        if not full:
            return
        tiles = [Oldest(held.slot, tile * held.tiles, int(host[row][self.first + held.tiles])) for row, held in full]
        self.packing(self.caches, tiles)
        for _, held in full:
            held.tiles += 1
