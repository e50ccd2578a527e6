"""Launch of the append kernel: one new token of every sequence into one layer's cache, packing what must make room."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aatc_cli.runtime.kernels.encode import EncodeTables
from aatc_cli.runtime.kernels.launch import ELEMENTS, function, launch
from aatc_cli.runtime.kernels.tables import LayerTables


class Appender:
    """Appends to layers of one shape. The ring must be at least 64 tokens; lengths are read on the device."""

    def __init__(self, dim: int, sinks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim, self.sinks = dim, sinks
        self._append = function("append.cu", "append", (("D", dim), ("QTYPE", ELEMENTS[dtype])), device.index or 0)
        self.shared = 2 * dim * 64 * 4 + 64 * 4
        self._append.max_dynamic_shared_size_bytes = self.shared

    def __call__(
        self,
        new_keys: Tensor,
        new_values: Tensor,
        keys: Tensor,
        values: Tensor,
        data: Tensor,
        tables: LayerTables,
        encode: EncodeTables,
        tokens: Tensor,
    ) -> None:
        """Put rows [B, C] into slots [B, slots, C] and, when the ring was full, 64 older ones into ``data``.

        data uint8 [B, max_tiles, tile_bytes]; tokens int32 [B], the new one counted.
        """
        batch, slots = keys.shape[:2]
        heads, (max_tiles, tile_bytes) = len(tables.keys), data.shape[1:]
        whole = (heads, slots, self.sinks, slots - self.sinks, tile_bytes, max_tiles, encode.search)
        launch(
            self._append,
            (2, heads, batch),
            self.dim,
            tuple(np.int32(value) for value in whole),
            (
                new_keys,
                new_values,
                keys,
                values,
                data,
                encode.widths,
                tables.offsets,
                encode.encode,
                encode.unit,
                encode.offset,
                encode.top,
                encode.spread,
                encode.weight,
                tokens,
            ),
            self.shared,
        )
