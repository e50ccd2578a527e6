"""The algebra of whiten with prediction: maps fitted on what a decoder will hold at the planned rate.

The whole model is gone through at one water level after another until coding takes the wanted bits a number; every pass
fits maps, transforms and energies layer by layer on the moments that the codes of the layers below would leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import WhitenedLayer, WhitenSettings
from aatc_cli.console import progress
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.planned_coding import ClassCosts, ReadBack, planned_coding
from aatc_cli.core.predictive import LayerMaps, Unit, units_of
from aatc_cli.core.predictive_fit import ClosedLoop, Coding, FittedUnit, Form
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.tile_bytes import order_bytes
from aatc_cli.core.tile_classes import TileRule
from aatc_cli.core.transform import GroupTransform, damped_factor
from aatc_cli.core.weights import fisher_weights, quadratic_weights, shrunk
from aatc_cli.methods.prediction_fields import PredictedCoding
from aatc_cli.methods.registry import quantizer_of, transform_of

# passes over the layers, and how near to the wanted rate they end
_PASSES = 8
_NEAR = 0.005
# nats a bit to begin with, and the largest step of its logarithm
_LEVEL, _STEP = 1e-6, 2.5
# bits a number that a level e times as high takes less, where nothing is known yet
_SLOPE = -0.35


@dataclass
class _Model:
    """What is read of Stats for all layers, on the device."""

    stats: Stats
    settings: WhitenSettings
    device: torch.device
    layers: list[LayerStats] = field(default_factory=list)
    metrics: list[dict[Side, Tensor]] = field(default_factory=list)
    chain: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in range(self.stats.geometry.layers):
            found = self.stats.layer(layer).to(self.device)
            self.layers.append(found)
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
            lambda layer, below: self.layers[layer].cross[below] / self.layers[layer].count,
            self.stats.settings.below,
            len(self.layers),
            Form(form.layers, form.within, form.rank, form.alone),
            metric=lambda layer: torch.block_diag(  # type: ignore[no-untyped-call]
                *(damped_factor(self.metrics[layer][side], 1e-4) for side in SIDES)
            ),
            chain=self.chain,
        )


class _Pass:
    """One pass over the layers at one water level."""

    def __init__(self, model: _Model, level: float) -> None:
        self.model, self.level = model, level
        coding = model.coding
        self.rule = TileRule(coding.quotas, coding.order)
        self.transform = transform_of(model.settings.transform)
        self.table = read_back(coding).to(model.device)
        self.shares = torch.tensor(self.rule.shares, dtype=torch.float64, device=model.device)
        self.members = self.rule.rank_shares().to(model.device)

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
        return planned_coding(fitted.energy, price, classes, self.table, self.level, self.model.coding.scale_bits)[0]

    def _metric(self, layer: int, unit: Unit) -> Tensor:
        channels = self.model.stats.geometry.channels
        span = slice(unit.columns.start % channels, unit.columns.start % channels + _size(unit))
        return self.model.metrics[layer][unit.side][span, span]


def read_back(coding: PredictedCoding) -> ReadBack:
    """What the quantizer does by width, up to the widest that is used."""
    cost, bits, share, noise = quantizer_of(coding.quantizer).read_back()
    count = coding.max_bits + 1
    return ReadBack(*(torch.tensor(part[:count], dtype=torch.float64) for part in (cost, bits, share, noise)))


def predicted_layers(stats: Stats, settings: WhitenSettings, device: torch.device) -> Iterator[WhitenedLayer]:
    """Every layer of a Transform with maps, fitted for the rate that the settings name."""
    model = _Model(stats, settings, device)
    level = _level_at(model, model.coding.form.rate)
    for layer, (maps, fitted, _) in enumerate(_Pass(model, level).layers()):
        yield _whitened(model, layer, maps, fitted)


def _level_at(model: _Model, rate: float) -> float:
    """The water level in nats a bit at which coding takes ``rate`` bits a number."""
    place, before, slope = math.log(_LEVEL), None, _SLOPE
    with progress("whiten: water level", _PASSES) as ticker:
        for _ in range(_PASSES):
            found = _Pass(model, math.exp(place)).rate()
            ticker.advance()
            if abs(found - rate) < _NEAR * rate:
                break
            if before is not None and before[0] != place:
                slope = min((found - before[1]) / (place - before[0]), -0.05)
            before = place, found
            place += max(-_STEP, min(_STEP, (rate - found) / slope))
    return math.exp(place)


def _whitened(model: _Model, layer: int, maps: LayerMaps, fitted: list[FittedUnit]) -> WhitenedLayer:
    """What a Transform holds of a layer, on the CPU."""
    stats, settings = model.layers[layer], model.settings
    sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]] = {}
    tables: dict[str, Tensor] = {"maps.below": maps.below.half().cpu(), "maps.within": maps.within.half().cpu()}
    if maps.squeeze is not None:
        tables["maps.squeeze"] = maps.squeeze.half().cpu()
    for side in SIDES:
        mine = [unit for place, unit in zip(model.units, fitted, strict=True) if place.side == side]
        encode = torch.stack([unit.transform.encode for unit in mine])
        decode = torch.stack([unit.transform.decode for unit in mine])
        variance = torch.cat([unit.energy for unit in mine])
        form = stats.q_outer / stats.count if side == "k" else stats.o_gram
        weight = quadratic_weights(decode, form)
        # of no quantizer that goes with prediction: residuals of the sampled rows are not known
        scale = torch.where(variance > 0, variance.sqrt(), torch.ones_like(variance))
        bits = torch.zeros(variance.numel(), dtype=torch.int64)
        codec = TransformCodec(encode, decode, scale, bits, variance).to("cpu", torch.float64)
        sites[side] = codec, weight.cpu(), fisher_weights(decode, model.metrics[layer][side]).cpu()
        if stats.ranked:
            tables[f"{side}.ranks"] = stats.rank_costs(side, decode, settings.shrinkage).cpu()
    return WhitenedLayer(sites, tables)


def _size(unit: Unit) -> int:
    size: int = unit.columns.stop - unit.columns.start
    return size
