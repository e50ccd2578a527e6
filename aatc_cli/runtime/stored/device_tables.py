"""Tables of a plan on a GPU: where digits of every class lie, what codes are read as, and the matrix behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.rotation import Rotation
from aatc_cli.runtime.stored.tables import SideTables, side_tables
from aatc_cli.runtime.tiles.layer import TileLayer

# channels of a head group are read so many at a time
BLOCK = 32
_SLOTS = 4


@dataclass(frozen=True)
class ClassTables:
    """Dense tables of one class of one side, as `runtime.kernels.device_chunks` reads them."""

    quota: int
    slot_at: Tensor
    slot_how: Tensor
    level_at: Tensor
    slots: Tensor
    scale_at: Tensor


@dataclass(frozen=True)
class SideOnDevice:
    """One side of all layers: groups of ``heads`` heads of ``dim`` channels, ``size`` padded to ``padded``.

    half: pairs of a head, padded. column [2 half]: the channel of a head of every first and second one of a pair.
    rotary: channels of a head that turn; beside: whether pairs lie beside one another.
    """

    groups: int
    heads: int
    dim: int
    size: int
    padded: int
    half: int
    rotary: int
    beside: bool
    orders: int
    class_bits: int
    class_stride: int
    scale_bits: int
    scales: Tensor
    levels: Tensor
    matrix: Tensor
    unit: Tensor
    bias: Tensor
    column: Tensor
    classes: list[ClassTables]

    @classmethod
    def of(cls, layers: Sequence[TileLayer], side: Side, rotation: Rotation, device: str) -> SideOnDevice:
        """Of all layers of a plan; raises `AatcError` for a code that has no tables."""
        tables = [side_tables(_packing(layer), side, layer.biases[side]) for layer in layers]
        first, codecs = tables[0], [layer.codecs[side].codec for layer in layers]
        heads = layers[0].heads
        dim = first.groups * first.size // heads
        column, rotary, beside = _columns(dim, rotation if side == "k" else None)
        levels, starts = _level_table(tables, codecs)
        padded = -(-first.size // BLOCK) * BLOCK
        matrix, unit = _matrix(codecs, column, dim, padded)
        bias = _biases(tables, column, dim)
        classes = [_dense(tables, starts, k, padded, device) for k in range(len(first.quotas))]

        def moved(array: NDArray[Any]) -> Tensor:
            found: Tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
            return found

        return cls(
            first.groups,
            heads // first.groups,
            dim,
            first.size,
            padded,
            column.size // 2,
            rotary,
            beside,
            first.orders,
            first.class_bits,
            first.class_stride,
            first.scale_bits,
            moved(first.scales),
            moved(levels).to(torch.float16),
            moved(matrix).to(torch.float16),
            moved(unit),
            moved(bias),
            moved(column),
            classes,
        )


def _packing(layer: TileLayer) -> TilePacking:
    assert isinstance(layer.held, TilePacking)
    return layer.held


def unit_sizes(codec: TransformCodec) -> NDArray[np.float32]:
    """What latents are measured in, by channel: the quantizer's levels are the same for all channels in it. [C]."""
    size = codec.scale if codec.quantizer == "uniform-token-max" else codec.variance.sqrt()
    found: NDArray[np.float32] = size.cpu().to(torch.float32).numpy()
    return found


def _columns(dim: int, rotation: Rotation | None) -> tuple[NDArray[np.int32], int, bool]:
    """Channels of a head as pairs that turn together, first ones and then second ones, padded by -1.

    With them how many channels turn, and whether pairs lie beside one another.
    """
    style = "none" if rotation is None else rotation.style
    rotary = 0
    if rotation is not None and style != "none":
        rotary = rotation.full_tables(torch.zeros(1, dtype=torch.int64))[0].shape[1]
    turned, rest = np.arange(rotary), np.arange(rotary, dim)
    beside = style == "interleaved"
    if beside:
        low, high = np.arange(0, dim, 2), np.arange(1, dim, 2)
    else:
        low, high = np.split(turned, [rotary // 2])
        low, high = np.concatenate([low, rest[: len(rest) // 2]]), np.concatenate([high, rest[len(rest) // 2 :]])
    half = max(1 << (max(len(low), len(high)) - 1).bit_length(), 16)
    column = np.full(2 * half, -1, dtype=np.int32)
    column[: len(low)], column[half : half + len(high)] = low, high
    return column, rotary, beside


def _level_table(
    tables: Sequence[SideTables], codecs: Sequence[TransformCodec]
) -> tuple[NDArray[np.float32], dict[int, int]]:
    """Levels of every width in the units of a channel, after a zero; where those of a width begin.

    Raises `AatcError` where channels of a width do not have the same levels.
    """
    found: dict[int, NDArray[np.float32]] = {}
    for mine, codec in zip(tables, codecs, strict=True):
        units = unit_sizes(codec).reshape(mine.groups, mine.size)
        for k, group in np.ndindex(*mine.parts.shape[:2]):
            first, count = mine.parts[k, group, :2]
            for channel, slot, slots, level in mine.entries[first : first + count]:
                width = int(mine.slots[slot : slot + slots, 3].sum())
                unit = units[group, channel]
                own = mine.levels[level : level + (1 << width)] / (unit if unit > 0 else 1)
                if width not in found and unit > 0:
                    found[width] = own
                if unit > 0 and np.abs(own - found[width]).max() > 1e-3 * np.abs(own).max():
                    raise AatcError("channels of one width have levels of their own", "decode by the code itself")
    starts, held = {}, [np.zeros(1, dtype=np.float32)]
    for width in sorted(found):
        starts[width] = sum(map(len, held))
        held.append(found[width])
    return np.concatenate(held), starts


def _matrix(
    codecs: Sequence[TransformCodec], column: NDArray[np.int32], dim: int, padded: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Decode matrices [L, groups, padded, heads, 2 half] of units of latents, near one, and what one is worth."""
    groups, size = codecs[0].decode.shape[:2]
    made = np.zeros((len(codecs), groups, padded, size // dim, column.size), dtype=np.float32)
    for layer, codec in enumerate(codecs):
        whole = codec.decode.cpu().to(torch.float32).numpy() * unit_sizes(codec).reshape(groups, size, 1)
        by_head = whole.reshape(groups, size, size // dim, dim)
        made[layer, :, :size] = np.where(column >= 0, by_head[..., np.maximum(column, 0)], 0)
    largest = np.abs(made).max((2, 3, 4), initial=np.finfo(np.float32).tiny)
    unit = np.exp2(np.ceil(np.log2(largest))).astype(np.float32)
    return made / unit[:, :, None, None, None], unit


def _biases(tables: Sequence[SideTables], column: NDArray[np.int32], dim: int) -> NDArray[np.float32]:
    """What is added [L, groups, heads, 2 half], or nothing."""
    if not tables[0].bias.size:
        return np.zeros(0, dtype=np.float32)
    by_head = np.stack([mine.bias for mine in tables]).reshape(len(tables), tables[0].groups, -1, dim)
    found: NDArray[np.float32] = np.where(column >= 0, by_head[..., np.maximum(column, 0)], 0).astype(np.float32)
    return found


def _dense(tables: Sequence[SideTables], starts: dict[int, int], k: int, padded: int, device: str) -> ClassTables:
    """The tables of class ``k``: what a channel does not have points to level 0 and reads no digit."""
    layers, groups = len(tables), tables[0].groups
    slot_at = np.zeros((layers, groups, _SLOTS, padded), dtype=np.int32)
    slot_how = np.zeros_like(slot_at)
    level_at = np.zeros((layers, groups, padded), dtype=np.int32)
    most = np.zeros((layers, groups, padded), dtype=np.int32)
    scale_at = np.full((layers, groups), -1, dtype=np.int32)
    for layer, mine in enumerate(tables):
        for group in range(groups):
            first, count, place = mine.parts[k, group]
            scale_at[layer, group] = place if count else -1
            for channel, slot, slots, _ in mine.entries[first : first + count]:
                held = mine.slots[slot : slot + slots]
                # a channel of no size reads as its mean, whatever its code
                level_at[layer, group, channel] = starts.get(int(held[:, 3].sum()), 0)
                most[layer, group, channel] = slots
                for index, (at, bit, shift, bits) in enumerate(held):
                    slot_at[layer, group, index, channel] = at + bit // 8
                    stride, mask = (4, 3) if bits == 2 else (2, 1)
                    slot_how[layer, group, index, channel] = bit % 8 | shift << 3 | mask << 8 | stride << 12
    slots_of = most.reshape(layers, groups, -1, BLOCK).max(-1)
    blocks = (np.arange(1, slots_of.shape[-1] + 1) * (slots_of > 0)).max(-1, keepdims=True)
    slots_of = np.concatenate([slots_of, blocks.astype(np.int32)], -1)
    moved = [
        torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for array in (slot_at, slot_how, level_at, slots_of, scale_at)
    ]
    return ClassTables(int(tables[0].quotas[k]), *moved)
