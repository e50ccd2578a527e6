"""Chunks of a code of even cells in machine code, one at a time: every layer by `runtime.stored.compiled_layer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch
from torch import Tensor

from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.stored_rate import RateControl
from aatc_cli.runtime.stored.compiled_layer import Cells, CompiledLayer, Models

# latents and classes of a layer
Unpacked = tuple[Tensor, Tensor]


class CompiledChunk:
    """All layers of a plan, vectors of chunks to the bytes of every layer and back, as `core.stored_chunk.StoredCode`.

    Decoded layers are bfloat16 numbers, in both directions: a chunk that was written so reads the same there but for
    that rounding, and the other way round.
    """

    def __init__(self, layers: Sequence[StoredLayer], heads: int) -> None:
        self.heads = heads
        self.layers = [CompiledLayer(layer, heads) for layer in layers]
        self.depth = max(layer.maps.layers for layer in layers)

    def parts(self, rows: Sequence[Tensor], classes: Sequence[Tensor]) -> list[bytes]:
        """Bytes of every layer of rows [T, 2 C] float32 with classes [orders, T]."""
        control = RateControl([each.layer for each in self.layers], self.heads, int(rows[0].shape[0]))
        below: list[Tensor] = []
        found = []
        for place, layer in enumerate(self.layers):
            mine, told = rows[place], classes[place]
            targets = layer.targets(mine, below)
            tiles = told.shape[-1] // layer.layer.rule.tile
            coded = control.fit(place, tiles, torch.zeros(()), partial(_attempt, layer, targets, told))
            cells, read, models, step = coded
            found.append(layer.pack(cells, models, told, step))
            below = [layer.products.decode(below, read), *below][: self.depth]
        return found

    def read(self, parts: Sequence[bytes], tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """Vectors [T, 2 C] and classes [orders, T] of every layer; raises `AatcError` for bytes that are no layers."""
        # tables of symbols and matrices do not fit into a core's memory together
        unpacked = self._each(lambda layer, data: layer.unpacked(data, tokens), parts)
        below: list[Tensor] = []
        rows = []
        for layer, (mine, _) in zip(self.layers, unpacked, strict=True):
            decoded = layer.products.decode(below, mine)
            rows.append(decoded.float() if layer.mean is None else decoded.float() + layer.mean)
            below = [decoded, *below][: self.depth]
        return rows, [classes for _, classes in unpacked]

    def _each(self, read: Callable[[CompiledLayer, bytes], Unpacked], parts: Sequence[bytes]) -> list[Unpacked]:
        """What ``read`` finds in the bytes of every layer, by as many threads as torch has."""
        threads = torch.get_num_threads()
        if threads == 1:
            return [read(layer, data) for layer, data in zip(self.layers, parts, strict=True)]
        return list(_pool(threads).map(read, self.layers, parts))


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="aatc-layer")


def _attempt(
    layer: CompiledLayer, targets: Tensor, classes: Tensor, loudness: Tensor
) -> tuple[tuple[Cells, Tensor, Models, int], Tensor]:
    """Codes of a layer at one loudness of all tiles, and the bits they take."""
    step = int(loudness[0])
    cells, read, bits, models = layer.code(targets, classes, step)
    return (cells, read, models, step), torch.tensor([bits], dtype=torch.float64)
