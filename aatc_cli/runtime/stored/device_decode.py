"""Chunks to pages on a GPU: many chunks in a few launches of the kernels in `runtime.kernels.device_chunks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.casting import saturated
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.device_tables import ClassTables, SideOnDevice
from aatc_cli.runtime.stored.header import aligned
from aatc_cli.runtime.stored.pages import Pages, Scales
from aatc_cli.runtime.stored.rotation import Rotation

# numbers of a side that are between the kernels at once where head groups have several heads
_AT_ONCE = 1 << 27
# threads that put chunks into memory that a GPU reads
_COPIERS = 16


def device_available(device: str) -> bool:
    """Whether ``device`` is a GPU and Triton is there."""
    return device.startswith("cuda") and find_spec("triton") is not None


class DeviceDecoder:
    """The pages of any number of chunks of one codec, on a GPU.

    split: latents first, and a product by the library behind it; without it where head groups are single heads.
    rows, block, warps: the shape of a program, rows of tokens by channels of a step.
    """

    def __init__(self, code: TileCode, rotation: Rotation, tokens: int, device: str) -> None:
        self.rotation, self.tokens, self.device = rotation, tokens, device
        self.sides: dict[Side, SideOnDevice] = {
            side: SideOnDevice.of(code.layers, side, rotation, device) for side in SIDES
        }
        self.heads = self.sides["k"].groups * self.sides["k"].heads
        sizes = [aligned(size) for size in code.sizes(tokens)]
        self.layer = torch.tensor([sum(sizes[:index]) for index in range(len(sizes))], device=device)
        self.nbytes = torch.tensor([layer.held.nbytes for layer in code.layers], device=device)
        self.kernels: Any = import_module("aatc_cli.runtime.kernels.device_chunks")
        self.split = self.sides["k"].heads > 1
        self.rows, self.block, self.warps = 64, 32, 4

    def __call__(
        self, chunks: Sequence[memoryview], starts: Sequence[Sequence[int]], places: Tensor, dtype: torch.dtype,
        scales: Scales | None,
    ) -> Pages:  # fmt: skip
        """Pages of chunks that follow one another, whose layers begin at ``starts``, of tokens at ``places``."""
        ends = torch.tensor([0, *map(len, chunks)]).cumsum(0)
        whole = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))
        flat = whole.numpy()

        def put(chunk: memoryview, start: int) -> None:
            np.copyto(flat[start : start + len(chunk)], np.frombuffer(chunk, dtype=np.uint8))

        with ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1)) as pool:
            list(pool.map(put, chunks, ends[:-1].tolist()))
        begins = ends[:-1] + torch.tensor([each[0] for each in starts])
        return self.decode(whole.to(self.device, non_blocking=True), begins, places, dtype, scales)

    def decode(
        self, data: Tensor, starts: Tensor, places: Tensor, dtype: torch.dtype, scales: Scales | None = None
    ) -> Pages:
        """Pages [L, n, H, D] of chunks whose first layers begin at ``starts`` [m]; ``places`` [n] of all tokens.

        Nothing is checked: that is done on the host, before the bytes go to the device.
        """
        held = torch.float32 if scales is not None or dtype.itemsize < 2 else dtype
        count, layers = places.numel(), self.layer.numel()
        begins, made = starts.to(self.device), {}
        for side in SIDES:
            mine = self.sides[side]
            out = torch.empty(layers, count, mine.groups * mine.size, dtype=held, device=self.device)
            angles = self._angles(mine, places)
            (self._by_parts if self.split else self._whole)(mine, data, begins, angles, out)
            made[side] = torch.unflatten(out, -1, (self.heads, -1))
        if held == dtype:
            return Pages(made["k"], made["v"])
        if scales is None:
            return Pages(saturated(made["k"], dtype), saturated(made["v"], dtype))
        return Pages.of_rows({side: made[side].flatten(2) for side in SIDES}, self.heads, dtype, scales)

    def _angles(self, mine: SideOnDevice, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [n, 2 half] of first and second ones of pairs, one and zero for what is not turned."""
        if not mine.rotary:
            return torch.empty(0, device=self.device), torch.empty(0, device=self.device)
        cos, sin = (table.to(torch.float32) for table in self.rotation.full_tables(places.to(self.device)))
        index = mine.column.to(torch.int64)
        still = (index < 0) | (index >= cos.shape[1])
        index = index.masked_fill(still, 0)
        return (
            cos.index_select(1, index).masked_fill_(still, 1.0).contiguous(),
            sin.index_select(1, index).masked_fill_(still, 0.0).contiguous(),
        )

    def _whole(self, mine: SideOnDevice, data: Tensor, starts: Tensor, angles: tuple[Tensor, ...], out: Tensor) -> None:
        """All in one kernel, a head at a time."""
        layers, tokens, _ = out.shape
        every = tokens // TILE
        for index, tables in enumerate(mine.classes):
            grid = (-(-every * tables.quota // self.rows), mine.groups * mine.heads, layers)
            self.kernels.decode_kernel[grid](
                data,
                starts,
                self.layer,
                self.nbytes,
                *_tables(tables, mine),
                mine.matrix,
                mine.unit,
                mine.bias,
                *angles,
                out,
                self.tokens // TILE,
                every,
                tokens,
                mine.groups,
                mine.class_stride,
                E=mine.padded,
                **self._turn(mine, out),
                **self._class(mine, index, tables),
            )

    def _by_parts(
        self, mine: SideOnDevice, data: Tensor, starts: Tensor, angles: tuple[Tensor, ...], out: Tensor
    ) -> None:
        """Some layers at a time: latents by a kernel, their product, the rotation and the rest by a kernel."""
        layers, tokens, _ = out.shape
        every = tokens // TILE
        step = min(max(_AT_ONCE // (tokens * mine.groups * mine.padded), 1), layers)
        latents = torch.empty(step, mine.groups, tokens, mine.padded, dtype=torch.float16, device=self.device)
        alpha = torch.empty(step, mine.groups, tokens, device=self.device)
        for first in range(0, layers, step):
            count = min(step, layers - first)
            for index, tables in enumerate(mine.classes):
                grid = (-(-every * tables.quota // self.rows), mine.groups, count)
                self.kernels.unpack_kernel[grid](
                    data,
                    starts,
                    self.layer,
                    self.nbytes,
                    *_tables(tables, mine),
                    mine.unit,
                    latents,
                    alpha,
                    self.tokens // TILE,
                    every,
                    tokens,
                    mine.groups,
                    mine.class_stride,
                    first,
                    E=mine.padded,
                    **self._class(mine, index, tables),
                )
            rows = _product(latents[:count].flatten(0, 1), mine.matrix[first : first + count].flatten(3).flatten(0, 1))
            self.kernels.finish_kernel[(-(-tokens // self.rows), mine.groups * mine.heads, count)](
                rows,
                alpha,
                mine.bias,
                *angles,
                out,
                tokens,
                mine.groups,
                first,
                ROWS=self.rows,
                **self._turn(mine, out),
            )

    def _class(self, mine: SideOnDevice, index: int, tables: ClassTables) -> dict[str, Any]:
        """Constants of the kernels that read codes."""
        return {
            "K": index,
            "Q": tables.quota,
            "CLASS_BITS": mine.class_bits,
            "BY_GROUP": mine.orders > 1,
            "SCALE_BITS": mine.scale_bits,
            "ROWS": self.rows,
            "KB": self.block if mine.padded % self.block == 0 else 32,
            "num_warps": self.warps,
        }

    def _turn(self, mine: SideOnDevice, out: Tensor) -> dict[str, Any]:
        """Constants of the kernels that write pages."""
        return {
            "D": mine.dim,
            "H": mine.half,
            "HEADS": mine.heads,
            "ROTARY": mine.rotary,
            "BESIDE": mine.beside,
            "BIAS": mine.bias.numel() > 0,
            "LARGEST": torch.finfo(out.dtype).max,
        }


def _tables(tables: ClassTables, mine: SideOnDevice) -> tuple[Tensor, ...]:
    """Tables of a class in the order in which kernels take them."""
    return (tables.slot_at, tables.slot_how, tables.level_at, tables.slots, mine.levels, tables.scale_at, mine.scales)


def _product(latents: Tensor, matrix: Tensor) -> Tensor:
    """Rows [m, n, N] in float32 of latents [m, n, E] and matrices [m, E, N] in float16."""
    if latents.is_cuda:
        return torch.bmm(latents, matrix, out_dtype=torch.float32)
    return latents.float() @ matrix.float()
