"""Rows to tiles on a CPU: the plan's matrix by a library, scales, codes and planes by numba, layers by threads."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.lloyd import CANDIDATES
from aatc_cli.core.scales import SCALE_STEPS
from aatc_cli.core.tile_bytes import ALIGNMENT
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.core.tile_tags import pack_classes
from aatc_cli.runtime.stored.code import Rows, TileCode
from aatc_cli.runtime.stored.encode_tables import SideCodes
from aatc_cli.runtime.stored.host_decode import pool_of
from aatc_cli.runtime.stored.tables import scale_values


class HostEncoder:
    """The tiles of rows of a plan's layers, as `TileCode.encode` makes them but for rounding."""

    def __init__(self, code: TileCode, threads: int) -> None:
        self.layers, self.rule = code.layers, code.layers[0].rule
        self.sides: dict[Side, _Side] = {side: _Side(SideCodes.of(code.layers, side)) for side in SIDES}
        self.nbytes = [layer.held.nbytes for layer in code.layers]
        self.pool = pool_of(threads)
        self.quotas = np.array(self.rule.quotas)
        self.kernel: Any = import_module("aatc_cli.runtime.kernels.host_encode").encode_side

    def __call__(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """Tiles of every layer of rows [L, n, C] without rotation; received [L, orders, n] ranks tokens."""
        layers, tokens, _ = rows["k"].shape
        classes = None
        if self.rule.classes > 1:
            found = torch.stack([self.rule.classes_of(mine, first, layer) for layer, mine in enumerate(received)])
            classes = torch.unflatten(found, -1, (-1, TILE))
        order = np.zeros((layers, 1, 0), dtype=np.int64) if classes is None else rows_of(classes).flatten(-2).numpy()
        parts = [torch.zeros(tokens // TILE * size, dtype=torch.uint8) for size in self.nbytes]
        tasks = [(side, layer) for layer in range(layers) for side in SIDES]
        list(self.pool.map(lambda task: self._some(task[0], task[1], rows, order, parts), tasks))
        if classes is not None:
            masks = pack_classes(classes.transpose(1, 2), self.rule.classes)
            heads = torch.nn.functional.pad(masks, (0, -masks.shape[-1] % ALIGNMENT)).flatten(-2)
            for part, head, size in zip(parts, heads, self.nbytes, strict=True):
                part.view(-1, size)[:, : head.shape[-1]] = head
        return parts

    def _some(self, side: Side, layer: int, rows: Rows, order: Any, parts: list[Tensor]) -> None:
        """One side of one layer."""
        mine, out = self.sides[side], parts[layer].numpy()
        codes = mine.codes
        steps, one = SCALE_STEPS.get(codes.scale_bits, (0.0, 0))
        self.kernel(
            mine.units(rows[side][layer], layer),
            order[layer],
            mine.widths[layer],
            mine.prices[layer],
            codes.edges,
            mine.rises,
            codes.sizes,
            codes.starts,
            mine.factors,
            mine.scales,
            mine.inverses,
            steps,
            one,
            codes.scale_bits,
            mine.channel[layer],
            mine.shift[layer],
            mine.at[layer],
            mine.planes[layer],
            mine.scale_at[layer],
            self.quotas,
            self.nbytes[layer],
            out,
            out.view(np.uint32),
            out.view(np.uint16),
        )


class _Side:
    """Tables of one side of all layers, those of all classes beside one another."""

    def __init__(self, codes: SideCodes) -> None:
        self.codes = codes
        # rows times matrix, channel by channel
        self.matrix, self.offset = codes.matrix.mT.contiguous(), codes.offset[..., None]
        # what lies between a magnitude and the next; nothing above the last of a width
        self.rises = np.where(np.isinf(codes.edges), 0, np.diff(codes.sizes, append=0)).astype(np.float32)
        self.factors = np.array(CANDIDATES, dtype=np.float32)
        self.scales = scale_values(codes.scale_bits)
        ones = np.ones_like(self.scales)
        self.inverses = np.divide(1, self.scales, out=ones, where=np.isfinite(self.scales) & (self.scales > 0))
        planes = max(each.channel.shape[2] for each in codes.classes)
        self.widths, self.prices, self.planes, self.scale_at = (
            np.stack([getattr(each, name) for each in codes.classes], 1)
            for name in ("widths", "prices", "planes", "scale_at")
        )
        self.channel, self.shift, self.at = (
            np.stack([_padded(getattr(each, name), planes) for each in codes.classes], 1)
            for name in ("channel", "shift", "at")
        )

    def units(self, rows: Tensor, layer: int) -> Any:
        """Latents [groups, E, n] in units of their channels of rows [n, C]."""
        by_group = torch.unflatten(rows, -1, (self.codes.groups, self.codes.size)).permute(1, 2, 0)
        return torch.baddbmm(self.offset[layer], self.matrix[layer], by_group, beta=-1).numpy()


def _padded(array: Any, planes: int) -> Any:
    """Tables [L, groups, P, ...] with room for as many planes as the widest class has."""
    room = [(0, 0)] * array.ndim
    room[2] = (0, planes - array.shape[2])
    return np.pad(array, room)
