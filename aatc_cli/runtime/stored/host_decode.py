"""Chunks to pages on a CPU with threads: the kernel of numba over all layers and sides at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.header import damaged
from aatc_cli.runtime.stored.pages import Pages, Scales
from aatc_cli.runtime.stored.rotation import Rotation
from aatc_cli.runtime.stored.tables import SideTables, side_tables

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_STYLES = {"none": 0, "half": 1, "half-once": 1, "interleaved": 2}


def host_available() -> bool:
    """Whether numba is there, which makes the kernel."""
    return find_spec("numba") is not None


class HostDecoder:
    """The pages of chunks of one codec; calls from several threads are served one after another by ``threads`` each."""

    def __init__(self, code: TileCode, rotation: Rotation, heads: int, threads: int) -> None:
        self.rotation, self.heads = rotation, heads
        self.tables = [_tables_of(layer.held, layer.biases) for layer in code.layers]
        self.pool = _pool(threads)
        self.kernels: Any = import_module("aatc_cli.runtime.kernels.host_chunks")

    def __call__(self, parts: list[Tensor], places: Tensor, dtype: torch.dtype, scales: Scales | None) -> Pages:
        """Pages of the tokens at ``places`` from the bytes of every layer; what no kernel writes goes by float32."""
        kind = 0 if scales is not None else _KINDS.get(dtype, 0)
        count, layers = places.numel(), len(self.tables)
        channels = self.tables[0]["k"].groups * self.tables[0]["k"].size
        held = torch.float32 if kind == 0 else torch.int16
        pages = {side: torch.empty(layers, count, channels, dtype=held) for side in SIDES}
        style = _STYLES[self.rotation.style]
        cos, sin = (
            (table.to(torch.float32).contiguous().numpy() for table in self.rotation.full_tables(places))
            if style
            else (np.zeros((count, 0), dtype=np.float32),) * 2
        )

        def one(task: tuple[int, Side]) -> None:
            layer, side = task
            out = pages[side][layer].numpy()
            self._side(parts[layer], self.tables[layer][side], (cos, sin), style if side == "k" else 0, kind, out)

        list(self.pool.map(one, [(layer, side) for layer in range(layers) for side in SIDES]))
        if kind:
            whole = {side: torch.unflatten(pages[side].view(dtype), -1, (self.heads, -1)) for side in SIDES}
            return Pages(whole["k"], whole["v"])
        return Pages.of_rows({side: pages[side] for side in SIDES}, self.heads, dtype, scales)

    def _side(self, part: Tensor, tables: SideTables, angles: tuple[Any, Any], style: int, kind: int, out: Any) -> None:
        data = part.numpy()
        if data.ctypes.data % 4:
            data = data.copy()
        cos, sin = angles
        none = np.zeros(0, dtype=np.float32 if kind else np.uint16)
        wide, narrow = (out.ravel(), none) if kind == 0 else (none, out.view(np.uint16).ravel())
        dim = out.shape[1] // self.heads
        sound = self.kernels.kernel_of(tables.size, dim, cos.shape[1] if style else 0, style)(
            data,
            data.view(np.uint32),
            data.view(np.uint16),
            tables.nbytes,
            tables.parts,
            tables.entries.ravel(),
            tables.slots.ravel(),
            tables.levels,
            tables.basis.ravel(),
            tables.scales,
            tables.scale_bits,
            tables.bias,
            tables.quotas,
            tables.orders,
            tables.class_bits,
            tables.class_stride,
            cos.ravel(),
            sin.ravel(),
            kind,
            wide,
            narrow,
        )
        if not sound:
            raise damaged("its tokens are not in the classes of its plan")


def with_threads(codec: StoredCodec, threads: int = 0) -> StoredCodec:
    """The codec with its decoder on a CPU; as it is where numba is missing or the code has no tables.

    threads: how many work at once, torch's number without one.
    """
    from dataclasses import replace

    code = codec.code
    if not host_available() or codec.device != "cpu" or not isinstance(code, TileCode):
        return codec
    if any(layer.rule.tile != TILE for layer in code.layers):
        return codec
    try:
        found = HostDecoder(code, codec.rotation, codec.geometry.kv_heads, threads or torch.get_num_threads())
    except AatcError:
        return codec
    return replace(codec, fast=found)


def _tables_of(held: Any, biases: Any) -> dict[Side, SideTables]:
    assert isinstance(held, TilePacking)
    return {side: side_tables(held, side, biases[side]) for side in SIDES}


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="aatc-chunk")
