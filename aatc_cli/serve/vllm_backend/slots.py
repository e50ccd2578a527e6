"""The store of one request and layer in an engine: rows in its slot, tiles in its blocks, nothing of its own."""

from __future__ import annotations

from torch import Tensor

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
