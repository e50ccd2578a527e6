"""Rows to tiles on a GPU: the plan's matrix by a library, scales, codes and planes by kernels, many tiles at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.lloyd import CANDIDATES
from aatc_cli.core.scales import SCALE_STEPS, scale_grid
from aatc_cli.core.tile_bytes import ALIGNMENT
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.core.tile_tags import pack_classes
from aatc_cli.runtime.stored.code import Rows, TileCode
from aatc_cli.runtime.stored.encode_tables import ClassCodes, SideCodes

# numbers of a side that are coded at once
_AT_ONCE = 1 << 27
BLOCK = 32


class DeviceEncoder:
    """The tiles of rows of a plan's layers, as `TileCode.encode` makes them but for rounding."""

    def __init__(self, code: TileCode, device: str) -> None:
        self.layers, self.device, self.rule = code.layers, device, code.layers[0].rule
        self.sides: dict[Side, _SideOnDevice] = {
            side: _SideOnDevice(SideCodes.of(code.layers, side), device) for side in SIDES
        }
        self.nbytes = [layer.held.nbytes for layer in code.layers]
        self.kernels: Any = import_module("aatc_cli.runtime.kernels.device_encode")

    def __call__(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """Tiles of every layer, in host memory, of rows [L, n, C]; received [L, orders, n] ranks their tokens."""
        layers, tokens, _ = rows["k"].shape
        tiles = tokens // TILE
        classes = self._classes(received, first)
        order = self._order(classes, layers, tokens)
        starts = np.cumsum([0, *(tiles * size for size in self.nbytes)])
        out = torch.zeros(int(starts[-1]), dtype=torch.uint8, device=self.device)
        begins, sizes = (torch.from_numpy(np.array(x)).to(self.device) for x in (starts[:-1], self.nbytes))
        for side in SIDES:
            mine = self.sides[side]
            step = min(max(_AT_ONCE // (tokens * mine.codes.groups * mine.padded), 1), layers)
            for low in range(0, layers, step):
                span = slice(low, min(low + step, layers))
                latents = mine.latents(rows[side][span], span)
                self._side(mine, latents, order[span], (begins, sizes, out), low)
        held = torch.empty(out.shape, dtype=torch.uint8, pin_memory=out.is_cuda).copy_(out)
        parts = [held[starts[layer] : starts[layer + 1]] for layer in range(layers)]
        if classes is not None:
            self._put_classes(parts, classes)
        return parts

    def _classes(self, received: Tensor, first: int) -> Tensor | None:
        """Classes of the tokens [L, orders, tiles, t]; None in a plan of one."""
        if self.rule.classes == 1:
            return None
        found = torch.stack([self.rule.classes_of(mine, first, layer) for layer, mine in enumerate(received)])
        return torch.unflatten(found, -1, (-1, TILE))

    def _order(self, classes: Tensor | None, layers: int, tokens: int) -> Tensor:
        """The token of a tile in every row [L, orders, n]."""
        if classes is None:
            return torch.arange(TILE, device=self.device, dtype=torch.int32).repeat(layers, 1, tokens // TILE)
        return rows_of(classes).flatten(-2).to(torch.int32).contiguous()

    def _put_classes(self, parts: list[Tensor], classes: Tensor) -> None:
        """Write the classes at the head of the tiles of every layer."""
        masks = pack_classes(classes.transpose(1, 2), self.rule.classes)
        room = -masks.shape[-1] % ALIGNMENT
        heads = torch.nn.functional.pad(masks, (0, room)).flatten(-2).cpu()
        for part, head, size in zip(parts, heads, self.nbytes, strict=True):
            part.view(-1, size)[:, : head.shape[-1]] = head

    def _side(
        self, mine: _SideOnDevice, latents: Tensor, order: Tensor, out: tuple[Tensor, Tensor, Tensor], low: int
    ) -> None:
        layers, groups, tokens, padded = latents.shape
        codes = torch.empty(latents.shape, dtype=torch.uint8, device=self.device)
        scales = torch.empty(layers, groups, tokens, dtype=torch.int32, device=self.device)
        grid = (tokens // TILE, groups, layers)
        steps, one = SCALE_STEPS.get(mine.codes.scale_bits, (0.0, 0))
        for tables in mine.classes:
            self.kernels.search_kernel[grid](
                latents,
                order,
                tables.start,
                tables.half,
                tables.price,
                tables.steps,
                tables.count,
                mine.edges,
                mine.sizes,
                mine.factors,
                mine.scales,
                codes,
                scales,
                tokens,
                groups,
                low,
                K0=tables.codes.first,
                Q=tables.codes.quota,
                E=padded,
                BY_GROUP=order.shape[1] > 1,
                STEPS=steps,
                ONE=one,
                SCALE_BITS=mine.codes.scale_bits,
                CANDIDATES=len(CANDIDATES),
                KB=BLOCK,
            )
            self.kernels.pack_kernel[grid](
                codes,
                scales,
                tables.channel,
                tables.shift,
                tables.at,
                tables.planes,
                tables.scale_at,
                *out,
                tokens,
                groups,
                low,
                K0=tables.codes.first,
                Q=tables.codes.quota,
                E=padded,
                PLANES=tables.codes.channel.shape[2],
                SCALE_BITS=mine.codes.scale_bits,
            )


class _ClassOnDevice:
    """Tables of one class, channels padded to blocks."""

    def __init__(self, codes: ClassCodes, starts: NDArray[np.int32], padded: int, device: str) -> None:
        self.codes = codes
        widths = np.pad(codes.widths, ((0, 0), (0, 0), (0, padded - codes.widths.shape[2])))
        prices = np.pad(codes.prices, ((0, 0), (0, 0), (0, padded - codes.widths.shape[2])))
        half = np.where(widths > 0, 1 << np.maximum(widths - 1, 0), 0).astype(np.int32)
        steps = np.maximum(widths - 1, 0).reshape(*widths.shape[:2], -1, BLOCK).max(-1)
        arrays = (starts[widths], half, prices, steps, (widths > 0).sum(-1).astype(np.int32))
        self.start, self.half, self.price, self.steps, self.count = (_moved(x, device) for x in arrays)
        tables = (codes.channel, codes.shift, codes.at, codes.planes, codes.scale_at)
        self.channel, self.shift, self.at, self.planes, self.scale_at = (_moved(x, device) for x in tables)


class _SideOnDevice:
    """Tables of one side of all layers, on the device."""

    def __init__(self, codes: SideCodes, device: str) -> None:
        self.codes = codes
        self.padded = -(-codes.size // BLOCK) * BLOCK
        room = self.padded - codes.size
        self.matrix = torch.nn.functional.pad(codes.matrix, (0, room)).to(device)
        self.offset = torch.nn.functional.pad(codes.offset, (0, room)).to(device)
        self.edges, self.sizes = _moved(codes.edges, device), _moved(codes.sizes, device)
        self.factors = torch.tensor(CANDIDATES, dtype=torch.float32, device=device)
        bits = codes.scale_bits
        grid = scale_grid(torch.device(device), bits).float() if bits < 16 else torch.zeros(1, device=device)
        self.scales = grid
        self.classes = [_ClassOnDevice(each, codes.starts, self.padded, device) for each in codes.classes]

    def latents(self, rows: Tensor, span: slice) -> Tensor:
        """Latents [l, groups, n, padded] in units of their channels, of rows [l, n, C] of the layers in ``span``."""
        by_group = torch.unflatten(rows, -1, (self.codes.groups, self.codes.size)).transpose(1, 2)
        flat = torch.baddbmm(
            self.offset[span].flatten(0, 1)[:, None], by_group.flatten(0, 1), self.matrix[span].flatten(0, 1), beta=-1
        )
        return torch.unflatten(flat, 0, (-1, self.codes.groups))


def _moved(array: NDArray[np.generic], device: str) -> Tensor:
    moved: Tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    return moved
