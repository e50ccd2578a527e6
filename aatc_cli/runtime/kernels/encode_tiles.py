"""Launch of the kernel that packs tiles with classes: from latents and what tokens received to records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.runtime.kernels.launch import function, launch

_THREADS = 256


@dataclass(frozen=True)
class EncodeCall:
    """What a launch is given: latents float32 [n, 64, H, D] of both sides, of equal strides, received [n, orders, 64].

    tables: of the layer (`fused_tiles.encode.EncodeTables`).
    """

    keys: Tensor
    values: Tensor
    received: Tensor
    tables: Any

    def numbers(self) -> tuple[Any, ...]:
        """The scalars that come first in the kernel's signature."""
        t = self.tables
        strides = self.keys.stride(1), self.keys.stride(2)
        assert self.values.stride() == self.keys.stride()
        assert self.keys.stride(0) == 64 * strides[0]
        whole = t.classes, self.received.shape[1], t.nbytes // 4, t.places.shape[1], t.cells.shape[0], *strides
        return tuple(np.int32(value) for value in whole)

    def arguments(self, out: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a launch in the order of the kernel's signature."""
        t = self.tables
        given = self.keys, self.values, self.received, t.class_of, t.counts, t.channels, t.cells, t.before
        return *given, t.scale_codes, t.scales, t.entries, t.places, t.word_counts, out

    def shared_bytes(self) -> int:
        """Shared bytes of a program, as the kernel lays them out."""
        return 128 * self.keys.shape[3] + 192 + 9 * int(self.tables.cells.shape[0])


class TileEncoder:
    """Packs tiles of layers whose heads have ``dim`` dimensions."""

    def __init__(self, dim: int, device: torch.device) -> None:
        defines = (("E", dim), ("QTYPE", 2))
        self._kernel = function("encode_tiles.cu", "encode_tiles", defines, device.index or 0)
        self._kernel.max_dynamic_shared_size_bytes = 128 * dim + 192 + (16 << 10)

    def __call__(self, call: EncodeCall, out: Tensor) -> Tensor:
        """Tiles uint8 [n, nbytes] -> ``out``."""
        if out.shape[0]:
            grid = (out.shape[0], call.keys.shape[2], 1)
            launch(self._kernel, grid, _THREADS, call.numbers(), call.arguments(out), call.shared_bytes())
        return out
