"""The exact rows of every running request: sinks, the ring of recent tokens, and what attention they received.

One tensor for all layers, made when the model is loaded, so that the engine counts it with the weights. The last slot
belongs to nobody: rows that a captured batch has to spare are written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.runtime.fused_tiles.buffers import SlotRows, SlotSums
from aatc_cli.runtime.kernels.keep_rows import RowKeeper
from aatc_cli.serve.vllm_backend.numbers import on_device
from aatc_cli.serve.vllm_backend.turning import taken_off


class ExactSlots:
    """keys, values [L, slots + 1, s + w, C] in the model's dtype, received float32 [L, slots + 1, H, s + w]."""

    def __init__(self, layers: int, slots: int, window: Window, shape: tuple[int, int], like: Tensor) -> None:
        heads, dim = shape
        self.slots, self.window, self.heads = slots, window, heads
        self.width = window.sinks + window.recent
        rows = (layers, slots + 1, self.width, heads * dim)
        self.keys, self.values = (torch.zeros(rows, dtype=like.dtype, device=like.device) for _ in range(2))
        self.received = torch.zeros(layers, slots + 1, heads, self.width, dtype=torch.float32, device=like.device)
        self.keeper = RowKeeper(dim, like.dtype, like.device) if like.is_cuda else None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes + self.received.nbytes

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move slots (from, to), all at once."""
        if moves:
            source, target = on_device([*zip(*moves, strict=True)], self.keys.device)
            for buffer in (self.keys, self.values, self.received):
                for layer in buffer:
                    layer[target] = layer[source]

    def places(self, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Where the rows of tokens [n] by index of the requests in ``slots`` lie. -> rows [n], sums [n, H].

        Rows count over all slots of a layer, sums over all of its received numbers.
        """
        sinks, recent = self.window.sinks, self.window.recent
        slot = torch.where(tokens < sinks, tokens, sinks + (tokens - sinks) % recent)
        heads = torch.arange(self.heads, device=tokens.device)
        return slots * self.width + slot, (slots[:, None] * self.heads + heads) * self.width + slot[:, None]

    def write(
        self, layer: int, given: tuple[Tensor, Tensor], back: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor]
    ) -> None:
        """Write rotated keys and values [n, H, D] of tokens that have received nothing yet, at `places`.

        back: what takes the rotation off, [n, D] each (`Turning.back`).
        """
        kept = self.keys[layer], self.values[layer], self.received[layer]
        if self.keeper is not None:
            self.keeper(given, back, places, kept)
            return
        rows, sums = places
        kept[0].flatten(0, 1).index_copy_(0, rows, taken_off(given[0], back))
        kept[1].flatten(0, 1).index_copy_(0, rows, given[1].flatten(1))
        kept[2].view(-1).index_fill_(0, sums.flatten(), 0.0)

    def oldest(self, layer: int, slots: Tensor, packed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, count, C] and received [n, H, count] of the oldest tokens of the rings in ``slots``.

        packed [n]: how many tokens behind the sinks are packed.
        """
        place = (packed[:, None] + torch.arange(count, device=slots.device)) % self.window.recent + self.window.sinks
        rows = slots[:, None]
        received = self.received[layer][slots].gather(2, place[:, None].expand(-1, self.heads, -1))
        return self.keys[layer][rows, place], self.values[layer][rows, place], received


class HeldRows(SlotRows):
    """The rows of one request in its slot, as a store reads and writes them: views [1, s + w, C] of the buffer."""

    def __init__(self, window: Window, keys: Tensor, values: Tensor, tokens: int) -> None:
        self.window, self.keys, self.values = window, keys, values
        sinks = min(tokens, window.sinks)
        self._hold(sinks, min(tokens - sinks, window.recent))


class HeldSums(SlotSums):
    """What the tokens of one request's ring received: a view [1, H, w] of the buffer."""

    def __init__(self, window: Window, held: Tensor, tokens: int) -> None:
        self.window, self.held = window, held
        self.taken = None
        self._ahead = self._before = None
        self.show(min(max(tokens - window.sinks, 0), window.recent))
