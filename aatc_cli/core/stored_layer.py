"""One layer of the storage code: every unit predicted from what is decoded, the rest coded in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.cell_code import CellCode, loudness_size
from aatc_cli.core.predictive import LayerMaps, Unit, units_of
from aatc_cli.core.stepped_codec import SteppedCodec
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.unit_code import Coded, UnitCode


@dataclass(frozen=True)
class LayerCodes:
    """Codes of a layer: units[u][k] of unit u in class k, in the order of `core.predictive.units_of`."""

    units: list[list[Coded | None]]


@dataclass(frozen=True)
class LayerCells:
    """Codes of a layer without a fixed size: cells [..., T, 2 C] int32, 0 where a token's class has none.

    loudness [..., T / t] int64: of every tile, in steps of `loudness_size`.
    """

    cells: Tensor
    loudness: Tensor


AnyCodes = LayerCodes | LayerCells


class StoredLayer:
    """Codes of one layer from its vectors and back, given the decoded layers below.

    hides: tokens of a class that codes nothing in a head group are not read there, of codes that read no layer below.
    mean [2 C]: what vectors are coded about. Vectors that are encoded have it; those that are decoded, here and below,
    lack it until `placed` adds it.
    """

    def __init__(
        self,
        codecs: Mapping[Side, TileCodec],
        maps: LayerMaps,
        rule: TileRule,
        *,
        hides: bool = False,
        mean: Tensor | None = None,
    ) -> None:
        self.codecs, self.maps, self.rule, self.hides, self.mean = dict(codecs), maps, rule, hides, mean
        self.groups: dict[Side, int] = {side: codecs[side].codec.groups for side in SIDES}
        self.channels = int(codecs["k"].codec.bits.numel())
        self.units = units_of(self.channels, self.groups)
        make = CellCode if self.variable else UnitCode
        self.codes: list[CellCode | UnitCode] = [make(codecs[unit.side], unit.group) for unit in self.units]

    @property
    def variable(self) -> bool:
        """Whether its codes have no fixed size."""
        return isinstance(self.codecs["k"].codec, SteppedCodec)

    def placed(self, decoded: Tensor) -> Tensor:
        """Decoded vectors [..., 2 C] with the mean that they were coded about."""
        return decoded if self.mean is None else decoded + self.mean.to(decoded)

    def encode(
        self, rows: Tensor, below: Sequence[Tensor], classes: Tensor, loudness: Tensor | None = None
    ) -> tuple[AnyCodes, Tensor]:
        """Codes of whole tiles of vectors ``rows`` [..., T, 2 C] (k, v), and what they decode to, without the mean.

        below: the decoded layers below, the nearest first, [..., T, 2 C] each, without theirs. classes [..., orders,
        T]. loudness [..., T / t] of codes without a fixed size, as `LayerCells` has it; none is 0.
        """
        coder = _Cells(self, classes, loudness) if self.variable else _Planes(self, classes)
        rows = rows if self.mean is None else rows - self.mean.to(rows)
        base, decoded = self.maps.from_below(list(below)), torch.zeros_like(rows)
        for place, unit in enumerate(self.units):
            told = self.maps.of_unit(unit, base, decoded)
            mine = rows[..., unit.columns]
            latents = (mine if told is None else mine - told) @ self.codes[place].encode
            self._add(decoded, unit, told, coder.coded(place, latents), self.codes[place].decode)
        return coder.codes(), decoded

    def decode(self, codes: AnyCodes, below: Sequence[Tensor], classes: Tensor) -> Tensor:
        """The vectors [..., T, 2 C] of codes, without the mean, as `encode` found them."""
        coder = (
            _Cells(self, classes, codes.loudness, codes.cells)
            if isinstance(codes, LayerCells)
            else _Planes(self, classes, codes.units)
        )
        base = self.maps.from_below(list(below))
        like = self.codes[0].encode
        decoded = like.new_zeros(*classes.shape[:-2], classes.shape[-1], 2 * self.channels)
        for place, unit in enumerate(self.units):
            told = self.maps.of_unit(unit, base, decoded)
            self._add(decoded, unit, told, coder.latents(place), self.codes[place].decode)
        return decoded

    def kept(self) -> Tensor | None:
        """Whether tokens of a class and head group are known at all: bool [n, groups]; None: all of them.

        With ``hides`` a class without bits on either side is not: its keys would read as nearly zero, and queries that
        look away from their tokens would look at them.
        """
        if not self.hides or self.groups["k"] != self.groups["v"]:
            return None
        found = self.codecs["k"].coded() | self.codecs["v"].coded()
        return None if bool(found.all()) else found

    def to(self, device: torch.device | str) -> StoredLayer:
        """The same on a device."""
        codecs: dict[Side, TileCodec] = {side: codec.to(device) for side, codec in self.codecs.items()}
        mean = None if self.mean is None else self.mean.to(device)
        return StoredLayer(codecs, self.maps.to(device), self.rule, hides=self.hides, mean=mean)

    @staticmethod
    def _add(decoded: Tensor, unit: Unit, told: Tensor | None, latents: Tensor | None, decode: Tensor) -> None:
        """Put a unit's prediction and decoded residual in its place."""
        if latents is not None:
            left = latents @ decode
            decoded[..., unit.columns] = left if told is None else left + told
        elif told is not None:
            decoded[..., unit.columns] = told


class _Planes:
    """Codes of fixed size of one layer, unit by unit: made of latents, or ``units`` that are read."""

    def __init__(self, layer: StoredLayer, classes: Tensor, units: list[list[Coded | None]] | None = None) -> None:
        self.layer, self.units = layer, [] if units is None else units
        self.order = rows_of(torch.unflatten(classes, -1, (-1, layer.rule.tile)))

    def coded(self, place: int, latents: Tensor) -> Tensor | None:
        """Code the latents [..., T, E] of a unit; what they are read as."""
        code = self._code(place)
        tiles = torch.unflatten(latents, -2, (-1, self.layer.rule.tile))
        self.units.append(code.quantize(tiles, self._places(place)))
        return self.latents(place)

    def latents(self, place: int) -> Tensor | None:
        """Latents [..., T, E] of a unit's codes; None: all are zero."""
        found = self._code(place).dequantize(self.units[place], self._places(place))
        return None if found is None else found.flatten(-3, -2)

    def codes(self) -> LayerCodes:
        """Those of all units."""
        return LayerCodes(self.units)

    def _code(self, place: int) -> UnitCode:
        code = self.layer.codes[place]
        assert isinstance(code, UnitCode)
        return code

    def _places(self, place: int) -> Tensor:
        """Rows of every tile by class, of the unit's own head [..., tiles, t]; of the layer, where it has one order."""
        return self.order[..., self.layer.units[place].group if self.order.shape[-3] > 1 else 0, :, :]


class _Cells:
    """Codes without a fixed size of one layer, unit by unit: made of latents, or ``cells`` that are read."""

    def __init__(
        self, layer: StoredLayer, classes: Tensor, loudness: Tensor | None, cells: Tensor | None = None
    ) -> None:
        self.layer, self.classes = layer, classes
        shape = *classes.shape[:-2], classes.shape[-1] // layer.rule.tile
        self.loudness = classes.new_zeros(shape) if loudness is None else loudness
        size = loudness_size(self.loudness, layer.codes[0].encode.dtype)
        self.loud = size.repeat_interleave(layer.rule.tile, -1)
        whole = *classes.shape[:-2], classes.shape[-1], 2 * layer.channels
        self.cells = torch.zeros(whole, dtype=torch.int32, device=classes.device) if cells is None else cells

    def coded(self, place: int, latents: Tensor) -> Tensor | None:
        """As of planes."""
        code = self._code(place)
        if not code.coded:
            return None
        found = code.quantize(latents, self._classes(place), self.loud)
        self.cells[..., self.layer.units[place].columns] = found
        return code.dequantize(found, self._classes(place), self.loud)

    def latents(self, place: int) -> Tensor | None:
        """As of planes."""
        code = self._code(place)
        mine = self.cells[..., self.layer.units[place].columns]
        return code.dequantize(mine, self._classes(place), self.loud) if code.coded else None

    def codes(self) -> LayerCells:
        """Those of all units."""
        return LayerCells(self.cells, self.loudness)

    def _code(self, place: int) -> CellCode:
        code = self.layer.codes[place]
        assert isinstance(code, CellCode)
        return code

    def _classes(self, place: int) -> Tensor:
        return self.classes[..., self.layer.units[place].group if self.classes.shape[-2] > 1 else 0, :]
