"""Chunks to pages on a GPU: many chunks in a few launches of the kernel in `runtime.kernels.device_chunks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.casting import saturated
from aatc_cli.core.rope import rotate_half, rotate_pairs
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.header import aligned
from aatc_cli.runtime.stored.pages import Pages, Scales
from aatc_cli.runtime.stored.rotation import Rotation
from aatc_cli.runtime.stored.tables import SideTables, side_tables

_SLOTS = 4


def device_available(device: str) -> bool:
    """Whether ``device`` is a GPU and Triton is there."""
    return device.startswith("cuda") and find_spec("triton") is not None


@dataclass(frozen=True)
class ClassTables:
    """Dense tables of one class of one side, on the device: as `runtime.kernels.device_chunks` reads them."""

    quota: int
    slot_at: Tensor
    slot_how: Tensor
    level_at: Tensor
    scale_at: Tensor


class DeviceDecoder:
    """The pages of any number of chunks of one codec, on a GPU."""

    def __init__(self, code: TileCode, rotation: Rotation, heads: int, tokens: int, device: str) -> None:
        self.rotation, self.heads, self.tokens, self.device = rotation, heads, tokens, device
        packings = [layer.held for layer in code.layers]
        assert all(isinstance(packing, TilePacking) for packing in packings)
        self.sides: dict[Side, _SideOnDevice] = {
            side: _SideOnDevice(
                [side_tables(layer.held, side, layer.biases[side]) for layer in code.layers],  # type: ignore[arg-type]
                [layer.codecs[side].codec.decode for layer in code.layers],
                rotation.style if side == "k" else "none",
                heads,
                device,
            )
            for side in SIDES
        }
        sizes = [aligned(size) for size in code.sizes(tokens)]
        self.layer = torch.tensor([sum(sizes[:index]) for index in range(len(sizes))], device=device)
        self.nbytes = torch.tensor([packing.nbytes for packing in packings], device=device)
        self.kernel: Any = import_module("aatc_cli.runtime.kernels.device_chunks").chunk_kernel

    def __call__(self, parts: Sequence[Tensor], places: Tensor, dtype: torch.dtype, scales: Scales | None) -> Pages:
        """Pages of one chunk from the bytes of its layers."""
        padded = [torch.nn.functional.pad(part, (0, aligned(part.numel()) - part.numel())) for part in parts]
        return self.decode(torch.cat(padded), torch.zeros(1, dtype=torch.int64), places, dtype, scales)

    def decode(
        self, data: Tensor, starts: Tensor, places: Tensor, dtype: torch.dtype, scales: Scales | None = None
    ) -> Pages:
        """Pages [L, n, H, D] of chunks whose first layers begin at ``starts`` [m]; ``places`` [n] of all tokens.

        Nothing is checked: that is done on the host, before the bytes go to the device.
        """
        held = torch.float32 if scales is not None or dtype.itemsize < 2 else dtype
        count, layers = places.numel(), self.layer.numel()
        angles = self._angles(places)
        made = {}
        for side in SIDES:
            mine = self.sides[side]
            out = torch.empty(layers, count, mine.groups * mine.size, dtype=held, device=self.device)
            self._launch(mine, data, starts.to(self.device), angles, out)
            made[side] = torch.unflatten(out, -1, (self.heads, -1))
        if held == dtype:
            return Pages(made["k"], made["v"])
        if scales is None:
            return Pages(saturated(made["k"], dtype), saturated(made["v"], dtype))
        return Pages.of_rows({side: made[side].flatten(2) for side in SIDES}, self.heads, dtype, scales)

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [n, D], one and zero for what is not turned."""
        dim = self.sides["k"].dim
        if self.rotation.style == "none":
            return torch.empty(0, device=self.device), torch.empty(0, device=self.device)
        cos, sin = (table.to(torch.float32) for table in self.rotation.full_tables(places.to(self.device)))
        rest = (0, dim - cos.shape[1])
        return (
            torch.nn.functional.pad(cos, rest, value=1.0).contiguous(),
            torch.nn.functional.pad(sin, rest).contiguous(),
        )

    def _launch(
        self, mine: _SideOnDevice, data: Tensor, starts: Tensor, angles: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        layers, tokens, _ = out.shape
        largest = torch.finfo(out.dtype).max
        for index, tables in enumerate(mine.classes):
            self.kernel[(tokens // TILE, mine.groups, layers)](
                data,
                starts,
                self.layer,
                self.nbytes,
                tables.slot_at,
                tables.slot_how,
                tables.level_at,
                mine.levels,
                tables.scale_at,
                mine.scales,
                mine.decode,
                mine.turned,
                mine.bias,
                mine.bias_turned,
                *angles,
                out,
                self.tokens // TILE,
                tokens,
                mine.groups,
                mine.class_stride,
                K=index,
                Q=tables.quota,
                E=mine.size,
                D=mine.dim,
                SLOTS=_SLOTS,
                CLASS_BITS=mine.class_bits,
                BY_GROUP=mine.orders > 1,
                SCALE_BITS=mine.scale_bits,
                TURN=mine.style != "none",
                BIAS=mine.bias.numel() > 0,
                LARGEST=largest,
            )


class _SideOnDevice:
    """The tables of one side of all layers on the device, dense by class."""

    def __init__(
        self, tables: Sequence[SideTables], decode: Sequence[Tensor], style: str, heads: int, device: str
    ) -> None:
        first = tables[0]
        self.groups, self.size, self.style = first.groups, first.size, style
        if self.size not in (16, 32, 64, 128, 256):
            raise AatcError(f"head groups of {self.size} channels have no kernel", "decode them by the code itself")
        self.dim = self.groups * self.size // heads
        self.orders, self.class_bits, self.class_stride = first.orders, first.class_bits, first.class_stride
        self.scale_bits = first.scale_bits
        self.scales = torch.from_numpy(first.scales).to(device)
        # level 0 is that of channels without bits
        self.levels = torch.from_numpy(np.concatenate([np.zeros(1, np.float32), *(t.levels for t in tables)])).to(
            device
        )
        self.decode = torch.stack([matrix.to(device, torch.float32) for matrix in decode]).contiguous()
        self.turned = self._turn(self.decode)
        bias = [torch.from_numpy(t.bias) for t in tables]
        whole = torch.stack(bias).to(device).view(len(tables), self.groups, self.size) if bias[0].numel() else None
        none = torch.empty(0, device=device)
        self.bias = none if whole is None else whole.contiguous()
        self.bias_turned = none if whole is None else self._turn(whole)
        starts = np.cumsum([1, *(t.levels.size for t in tables)])
        self.classes = [_dense(tables, starts, k, int(quota), device) for k, quota in enumerate(first.quotas.tolist())]

    def _turn(self, matrix: Tensor) -> Tensor:
        """The columns [..., E] of every head as a rotation by a quarter turns them."""
        if self.style == "none":
            return matrix
        by_head = torch.unflatten(matrix, -1, (-1, self.dim))
        turn = rotate_pairs if self.style == "interleaved" else rotate_half
        return turn(by_head).flatten(-2).contiguous()


def _dense(tables: Sequence[SideTables], starts: Any, k: int, quota: int, device: str) -> ClassTables:
    """The tables of class ``k``: what a channel does not have points to level 0 and reads no digit."""
    layers, groups, size = len(tables), tables[0].groups, tables[0].size
    slot_at = np.zeros((layers, groups, _SLOTS, size), dtype=np.int32)
    slot_how = np.zeros_like(slot_at)
    level_at = np.zeros((layers, groups, size), dtype=np.int32)
    scale_at = np.full((layers, groups), -1, dtype=np.int32)
    for layer, mine in enumerate(tables):
        for group in range(groups):
            first, count, place = mine.parts[k, group]
            scale_at[layer, group] = place if count else -1
            for channel, slot, slots, level in mine.entries[first : first + count]:
                level_at[layer, group, channel] = starts[layer] + level
                for index, (at, bit, shift, bits) in enumerate(mine.slots[slot : slot + slots]):
                    slot_at[layer, group, index, channel] = at + bit // 8
                    stride, mask = (4, 3) if bits == 2 else (2, 1)
                    slot_how[layer, group, index, channel] = bit % 8 | shift << 3 | mask << 8 | stride << 12
    moved = [torch.from_numpy(array).to(device) for array in (slot_at, slot_how, level_at, scale_at)]
    return ClassTables(quota, *moved)


def on_device(codec: StoredCodec) -> StoredCodec:
    """The codec with its decoder on a GPU; as it is where there is none, or the code has no kernel."""
    code = codec.code
    if not device_available(codec.device) or not isinstance(code, TileCode):
        return codec
    if codec.rotation.style == "half" and _partial(codec):
        return codec
    try:
        found = DeviceDecoder(code, codec.rotation, codec.geometry.kv_heads, codec.tokens, codec.device)
    except AatcError:
        return codec
    return replace(codec, fast=found)


def _partial(codec: StoredCodec) -> bool:
    """Whether only a part of a head is turned, whose halves do not lie half a head apart."""
    cos, _ = codec.rotation.full_tables(torch.zeros(1, dtype=torch.int64))
    return cos.shape[1] != codec.geometry.head_dim
