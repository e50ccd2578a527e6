"""Lengths of a layer's codes under every model of its entropy code, and which model is the shortest."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.stepped_tables import MODELS, MOST, OUTSIDE, SYMBOLS, WIDEST, code_lengths
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.stored_runs import PLAIN, runs_of


class Meter:
    """Lengths of codes under all models, by unit and class, on the device of the layer."""

    def __init__(self, layer: StoredLayer, places: int, orders: int) -> None:
        device = layer.codes[0].encode.device
        self.places, self.orders = places, orders
        classes = layer.rule.classes
        widths = torch.zeros(classes, 2 * layer.channels, dtype=torch.int64)
        place = torch.zeros_like(widths)
        order = torch.zeros(2 * layer.channels, dtype=torch.int64)
        for unit in layer.units:
            order[unit.columns] = unit.group if orders > 1 else 0
        for run in runs_of(layer, orders):
            widths[run.k, run.columns], place[run.k, run.columns] = run.width, run.place
        self.widths, self.order = widths.to(device), order.to(device)
        self.base = ((place * (WIDEST + 1) + widths) * SYMBOLS).to(device)
        self.shift = torch.from_numpy(PLAIN)[widths].to(device)
        table = np.zeros((WIDEST + 1, SYMBOLS, MODELS))
        for width in range(1, WIDEST + 1):
            table[width] = code_lengths(width)
        self.table = torch.from_numpy(table).view(-1, MODELS).to(device)

    def lengths(self, cells: Tensor, classes: Tensor, chunk: int) -> Tensor:
        """Bits of the symbols of every chunk [..., chunks]."""
        tokens = cells.shape[-2]
        shape = (*cells.shape[:-2], -(-tokens // chunk))
        if not self.places:
            return torch.zeros(shape, dtype=torch.float64, device=cells.device)
        where = torch.arange(tokens, device=cells.device) // chunk
        batch = torch.arange(cells.shape[:-2].numel(), device=cells.device).view(*cells.shape[:-2], 1)
        return self._by_model(cells, classes, batch * shape[-1] + where, shape).min(-1).values.sum(-1)

    def models(self, cells: Tensor, classes: Tensor) -> NDArray[np.uint8]:
        """The model of every unit and class of one chunk [T, 2 C] under which its codes are shortest."""
        if not self.places:
            return np.zeros(0, dtype=np.uint8)
        one = torch.zeros(cells.shape[0], dtype=torch.int64, device=cells.device)
        found: NDArray[np.uint8] = self._by_model(cells, classes, one, (1,))[0].argmin(-1).cpu().numpy()
        return found.astype(np.uint8)

    def _by_model(self, cells: Tensor, classes: Tensor, chunk: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Bits [*shape, places, MODELS]; chunk [..., T] of every token."""
        mine = classes.transpose(-1, -2)[..., self.order]
        column = torch.arange(cells.shape[-1], device=cells.device)
        high = cells >> self.shift[mine, column]
        symbols = torch.where(high.abs() <= MOST, high + MOST, OUTSIDE)
        bins = self.places * (WIDEST + 1) * SYMBOLS
        index = chunk[..., None] * bins + self.base[mine, column] + symbols
        count = torch.Size(shape).numel()
        counts = torch.bincount(index.flatten(), minlength=count * bins).view(count * self.places, -1)
        found = counts.to(torch.float64) @ self.table
        return found.view(*shape, self.places, MODELS)
