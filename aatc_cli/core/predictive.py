"""Prediction of a layer's vectors from what a decoder already holds: layers below, and head groups coded before.

A layer is coded unit by unit, a unit being one head group of one side: first those of the values, then those of the
keys. Of every unit only what a linear map does not tell is coded:

    x^_u = z_u W_u + Q(x_u - z_u W_u),   z_u = (decoded layers below, decoded units of this layer before u).

All vectors are rows, (k, v) of a layer side by side: 2 C numbers, those of the nearest layer first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.core import Side

Within = Literal["none", "values", "units"]


@dataclass(frozen=True)
class Unit:
    """One head group of one side. columns: its place among the 2 C numbers of a layer."""

    side: Side
    group: int
    columns: slice


def units_of(channels: int, groups: dict[Side, int]) -> list[Unit]:
    """The units of a layer in the order in which they are coded: values, then keys."""
    found = []
    for side, start in (("v", channels), ("k", 0)):
        size = channels // groups[side]  # type: ignore[index]
        found += [
            Unit(side, group, slice(start + group * size, start + (group + 1) * size))  # type: ignore[arg-type]
            for group in range(groups[side])  # type: ignore[index]
        ]
    return found


@dataclass(frozen=True)
class LayerMaps:
    """How one layer is predicted. Every tensor may have no rows: then nothing is predicted from there.

    squeeze [n 2 C, r]: the numbers that are taken of the n layers below; None: all n 2 C of them. below [r or n 2 C,
    2 C]: from those. within [2 C, 2 C]: from the decoded units of the layer, zero but for units coded before.
    """

    below: Tensor
    within: Tensor
    squeeze: Tensor | None = None

    @classmethod
    def none(cls, channels: int) -> LayerMaps:
        """Nothing is predicted."""
        empty = torch.zeros(0, 2 * channels)
        return cls(empty, empty)

    @property
    def layers(self) -> int:
        """Layers below that are read."""
        rows = self.below.shape[0] if self.squeeze is None else self.squeeze.shape[0]
        return rows // max(self.below.shape[1], 1)

    def from_below(self, below: list[Tensor]) -> Tensor | None:
        """What decoded layers below [..., 2 C], the nearest first, tell of this one: [..., 2 C]; None: nothing."""
        if not self.below.shape[0]:
            return None
        rows = torch.cat(below[: self.layers], -1)
        return (rows if self.squeeze is None else rows @ self.squeeze) @ self.below

    def of_unit(self, unit: Unit, base: Tensor | None, decoded: Tensor) -> Tensor | None:
        """The prediction [..., E] of a unit: ``base`` of `from_below`, ``decoded`` [..., 2 C] of the units so far."""
        found = None if base is None else base[..., unit.columns]
        if not self.within.shape[0]:
            return found
        inside = decoded @ self.within[:, unit.columns]
        return inside if found is None else found + inside

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> LayerMaps:
        """Move to a device, maps in ``dtype``."""
        squeeze = None if self.squeeze is None else self.squeeze.to(device, dtype)
        return LayerMaps(self.below.to(device, dtype), self.within.to(device, dtype), squeeze)


def read_before(units: list[Unit], within: Within) -> Iterator[list[slice]]:
    """For every unit the columns of the layer that it may be predicted from."""
    for place, unit in enumerate(units):
        before = units[:place]
        if within == "none":
            before = []
        elif within == "values":
            before = [other for other in before if unit.side == "k" and other.side == "v"]
        yield [other.columns for other in before]
