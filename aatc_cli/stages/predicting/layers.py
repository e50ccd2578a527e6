"""The algebra of whiten with prediction: maps fitted on what a decoder will hold at the planned rate.

The whole model is gone through at one water level after another until coding takes the wanted bits a number; every pass
fits maps, transforms and energies layer by layer on the moments that the codes of the layers below would leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import WhitenedLayer, WhitenSettings
from aatc_cli.console import progress
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.predictive import LayerMaps
from aatc_cli.core.predictive_fit import FittedUnit
from aatc_cli.core.weights import fisher_weights, quadratic_weights
from aatc_cli.methods.registry import transform_of
from aatc_cli.stages.predicting.passes import LayerPass, Moments

# passes over the layers, and how near to the wanted rate they end
_PASSES = 8
_NEAR = 0.005
# nats a bit to begin with, and the largest step of its logarithm
_LEVEL, _STEP = 1e-6, 2.5
# bits a number that a level e times as high takes less, where nothing is known yet
_SLOPE = -0.35


def predicted_layers(stats: Stats, settings: WhitenSettings, device: torch.device) -> Iterator[WhitenedLayer]:
    """Every layer of a Transform with maps, fitted for the rate that the settings name."""
    model = Moments(stats, settings, device)
    level = _level_at(model, model.coding.form.rate)
    for layer, (maps, fitted, _) in enumerate(LayerPass(model, level).layers()):
        yield _whitened(model, layer, maps, fitted)


def _level_at(model: Moments, rate: float) -> float:
    """The water level in nats a bit at which coding takes ``rate`` bits a number."""
    place, before, slope = math.log(_LEVEL), None, _SLOPE
    with progress("whiten: water level", _PASSES) as ticker:
        for _ in range(_PASSES):
            found = LayerPass(model, math.exp(place)).rate()
            ticker.advance()
            if abs(found - rate) < _NEAR * rate:
                break
            if before is not None and before[0] != place:
                slope = min((found - before[1]) / (place - before[0]), -0.05)
            before = place, found
            place += max(-_STEP, min(_STEP, (rate - found) / slope))
    return math.exp(place)


def _whitened(model: Moments, layer: int, maps: LayerMaps, fitted: list[FittedUnit]) -> WhitenedLayer:
    """What a Transform holds of a layer, on the CPU."""
    stats, settings = model.layers[layer], model.settings
    sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]] = {}
    tables: dict[str, Tensor] = {"maps.below": maps.below.half().cpu(), "maps.within": maps.within.half().cpu()}
    if maps.squeeze is not None:
        tables["maps.squeeze"] = maps.squeeze.half().cpu()
    kind = transform_of(settings.transform)
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
        tables |= {f"{side}.{name}": table.cpu() for name, table in kind.tables(side, stats).items()}
        if stats.ranked:
            tables[f"{side}.ranks"] = stats.rank_costs(side, decode, settings.shrinkage).cpu()
    return WhitenedLayer(sites, tables)
