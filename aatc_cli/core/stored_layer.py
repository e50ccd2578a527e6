"""One layer of the storage code: every unit predicted from what is decoded, the rest coded in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
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


class StoredLayer:
    """Codes of one layer from its vectors and back, given the decoded layers below.

    hides: tokens of a class that codes nothing in a head group are not read there, of codes that read no layer below.
    """

    def __init__(
        self, codecs: Mapping[Side, TileCodec], maps: LayerMaps, rule: TileRule, *, hides: bool = False
    ) -> None:
        self.codecs, self.maps, self.rule, self.hides = dict(codecs), maps, rule, hides
        self.groups: dict[Side, int] = {side: codecs[side].codec.groups for side in SIDES}
        self.channels = int(codecs["k"].codec.bits.numel())
        self.units = units_of(self.channels, self.groups)
        self.codes = [UnitCode(codecs[unit.side], unit.group) for unit in self.units]

    @property
    def variable(self) -> bool:
        """Whether its codes have no fixed size."""
        return isinstance(self.codecs["k"].codec, SteppedCodec)

    def encode(self, rows: Tensor, below: Sequence[Tensor], classes: Tensor) -> tuple[LayerCodes, Tensor]:
        """Codes of whole tiles of vectors ``rows`` [..., T, 2 C] (k, v), and what they decode to.

        below: the decoded layers below, the nearest first, [..., T, 2 C] each. classes [..., orders, T].
        """
        base, order = self.maps.from_below(list(below)), self._order(classes)
        decoded, found = torch.zeros_like(rows), []
        for unit, code in zip(self.units, self.codes, strict=True):
            told = self.maps.of_unit(unit, base, decoded)
            mine = rows[..., unit.columns]
            latents = (mine if told is None else mine - told) @ code.encode
            places = self._places(order, unit)
            coded = code.quantize(torch.unflatten(latents, -2, (-1, self.rule.tile)), places)
            found.append(coded)
            self._add(decoded, unit, told, code.dequantize(coded, places), code)
        return LayerCodes(found), decoded

    def decode(self, codes: LayerCodes, below: Sequence[Tensor], classes: Tensor) -> Tensor:
        """The vectors [..., T, 2 C] of codes, as `encode` found them."""
        base, order = self.maps.from_below(list(below)), self._order(classes)
        like = self.codes[0].encode
        decoded = like.new_zeros(*classes.shape[:-2], classes.shape[-1], 2 * self.channels)
        for unit, code, coded in zip(self.units, self.codes, codes.units, strict=True):
            told = self.maps.of_unit(unit, base, decoded)
            self._add(decoded, unit, told, code.dequantize(coded, self._places(order, unit)), code)
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
        return StoredLayer(codecs, self.maps.to(device), self.rule, hides=self.hides)

    def _order(self, classes: Tensor) -> Tensor:
        """Rows of every tile by class [..., orders, tiles, t]."""
        return rows_of(torch.unflatten(classes, -1, (-1, self.rule.tile)))

    def _places(self, order: Tensor, unit: Unit) -> Tensor:
        """Those of a unit's own head [..., tiles, t]; of the layer, where it has one order."""
        return order[..., unit.group if order.shape[-3] > 1 else 0, :, :]

    def _add(self, decoded: Tensor, unit: Unit, told: Tensor | None, latents: Tensor | None, code: UnitCode) -> None:
        """Put a unit's prediction and decoded residual in its place."""
        if latents is not None:
            left = latents.flatten(-3, -2) @ code.decode
            decoded[..., unit.columns] = left if told is None else left + told
        elif told is not None:
            decoded[..., unit.columns] = told
