"""The store of one request and layer in an engine: rows in its slot, tiles in its blocks, nothing of its own."""

from __future__ import annotations

from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.tiles.store import TileStore
from aatc_cli.serve.vllm_backend.pages import BlockPages
from aatc_cli.serve.vllm_backend.rows import ExactSlots, HeldRows, HeldSums
from aatc_cli.serve.vllm_backend.step import Prompt


class SlotStore(TileStore):
    """The cache of the request of ``prompt`` in ``exact`` and in blocks of ``cache``, uint8 [blocks, bytes]."""

    def __init__(self, form: FusedTilesStatic, exact: ExactSlots, layer: int, cache: Tensor, prompt: Prompt) -> None:
        window = form.window
        self.layer, self.window, self.batch = form.layers[layer].layer, window, 1
        self.tokens = prompt.tokens
        mine = slice(prompt.slot, prompt.slot + 1)
        self.exact = HeldRows(window, exact.keys[layer, mine], exact.values[layer, mine], prompt.tokens)
        self.pages = BlockPages(cache, prompt.blocks, self.layer.held.nbytes, prompt.tiles)
        self.received = HeldSums(window, exact.received[layer, mine, :, window.sinks :], prompt.tokens)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """As the store's own; rows [1, n, C] of first tokens, which follow nothing, are not put behind others."""
        if self.tokens:
            super().append(keys, values)
            return
        count, ahead = keys.shape[1], self.received.next(keys.shape[1])
        sinks = self.exact.fill_sinks(keys, values, 0)
        until = packed_tokens(count, self.window)
        if until:
            part = slice(sinks, sinks + until)
            self.pages.append(self._tiles({"k": keys[:, part], "v": values[:, part]}, ahead[..., part], 0))
        self.tokens = count
        if count > sinks:
            self.received.write(ahead[..., sinks:], 0)
            self.exact.write(keys[:, sinks:], values[:, sinks:], 0)
