"""One pass over all layers at a water level: maps, residuals and what coding does to them, on moments alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import WhitenSettings
from aatc_cli.core import SIDES, Side
from aatc_cli.core.planned_coding import ClassCosts, ReadBack, planned_coding
from aatc_cli.core.predictive import LayerMaps, Unit, units_of
from aatc_cli.core.predictive_fit import ClosedLoop, Coding, FittedUnit, Form
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.tile_bytes import order_bytes
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.transform import GroupTransform, damped_factor
from aatc_cli.core.weights import fisher_weights, shrunk
from aatc_cli.methods.prediction_fields import PredictedCoding
from aatc_cli.methods.registry import quantizer_of, transform_of


@dataclass
class Moments:
    """What is read of Stats for all layers, on the device."""

    stats: Stats
    settings: WhitenSettings
    device: torch.device
    layers: list[LayerStats] = field(default_factory=list)
    metrics: list[dict[Side, Tensor]] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    chain: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in range(self.stats.geometry.layers):
            found = self.stats.layer(layer).to(self.device)
            self.layers.append(found)
            self.means.append(torch.cat([found.mean(side) for side in SIDES]))
            self.metrics.append({side: shrunk(found.loss_metric(side), self.settings.shrinkage) for side in SIDES})

    @property
    def coding(self) -> PredictedCoding:
        """How residuals will be coded."""
        assert self.settings.prediction is not None
        return self.settings.prediction

    @property
    def units(self) -> list[Unit]:
        """Units of a layer."""
        groups: dict[Side, int] = {side: self.settings.head_groups.of(side) for side in SIDES}
        return units_of(self.stats.geometry.channels, groups)

    def loop(self) -> ClosedLoop:
        """Moments of nothing coded yet."""
        form = self.coding.form
        return ClosedLoop(
            self._products,
            self.stats.settings.below,
            len(self.layers),
            Form(form.layers, form.within, form.rank, form.alone),
            metric=lambda layer: torch.block_diag(  # type: ignore[no-untyped-call]
                *(damped_factor(self.metrics[layer][side], 1e-4) for side in SIDES)
            ),
            chain=self.chain,
        )

    def _products(self, layer: int, below: int) -> Tensor:
        """E[x_{l-j}^T x_l] of a layer and one below it, of what the transform leaves of them."""
        found = self.layers[layer].cross[below] / self.layers[layer].count
        if not transform_of(self.settings.transform).centred:
            return found
        return found - torch.outer(self.means[layer - below], self.means[layer])


class LayerPass:
    """One pass over the layers at one water level."""

    def __init__(self, model: Moments, level: float) -> None:
        self.model, self.level = model, level
        coding = model.coding
        self.rule = TileRule(coding.quotas, coding.order)
        self.transform = transform_of(model.settings.transform)
        variable = quantizer_of(coding.quantizer).expected_bits() is not None
        self.scale_bits = 0 if variable else coding.scale_bits
        self.table = read_back(coding).to(model.device)
        self.shares = torch.tensor(self.rule.shares, dtype=torch.float64, device=model.device)
        self.members = torch.from_numpy(self.rule.rank_shares()).to(model.device)

    def layers(self) -> Iterator[tuple[LayerMaps, list[FittedUnit], float]]:
        """Maps, residuals and bits a token of every layer."""
        loop = self.model.loop()
        for layer in range(len(self.model.layers)):
            yield loop.fit(layer, self.model.units, self.transform_of, self.coding_of)

    def rate(self) -> float:
        """Bits a number, classes and scales with it, padding not."""
        geometry = self.model.stats.geometry
        tags = 8 * order_bytes(self.rule, geometry.kv_heads) / self.rule.tile
        bits = math.fsum(found[2] + tags for found in self.layers())
        return bits / (2 * geometry.layers * geometry.channels)

    def transform_of(self, layer: int, unit: Unit, moment: Tensor) -> GroupTransform:
        """The transform of a unit's residual."""
        return self.transform.matrices(moment, self._metric(layer, unit))

    def coding_of(self, layer: int, unit: Unit, fitted: FittedUnit) -> Coding:
        """What coding does at this level."""
        decode = fitted.transform.decode[None]
        per_head = self.model.stats.geometry.kv_heads // self.model.settings.head_groups.of(unit.side)
        heads = slice(unit.group * per_head, (unit.group + 1) * per_head)
        ranks = self.model.layers[layer].rank_costs(unit.side, decode, self.model.settings.shrinkage, heads)
        floor = self.model.coding.floor
        costs = (1.0 - floor) * (self.members @ ranks[1 if self.rule.order == "head" else 0]) + floor
        # half of what a quadratic form says is divergence
        price = fisher_weights(decode, self._metric(layer, unit)) / 2
        classes = ClassCosts(self.shares, costs)
        return planned_coding(fitted.energy, price, classes, self.table, self.level, self.scale_bits)[0]

    def _metric(self, layer: int, unit: Unit) -> Tensor:
        channels = self.model.stats.geometry.channels
        span = slice(unit.columns.start % channels, unit.columns.start % channels + _size(unit))
        return self.model.metrics[layer][unit.side][span, span]


def read_back(coding: PredictedCoding) -> ReadBack:
    """What the quantizer does by width, up to the widest that is used."""
    cost, bits, share, noise = quantizer_of(coding.quantizer).read_back()
    count = coding.max_bits + 1
    return ReadBack(*(torch.tensor(part[:count], dtype=torch.float64) for part in (cost, bits, share, noise)))


def _size(unit: Unit) -> int:
    size: int = unit.columns.stop - unit.columns.start
    return size
