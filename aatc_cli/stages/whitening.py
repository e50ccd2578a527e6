"""The algebra of whiten: from the Stats of every layer to the sites of a Transform, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform, WhitenedLayer, WhitenSettings
from aatc_cli.console import progress
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.tile_rule import tile_lags
from aatc_cli.core.transform import group_moments
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights, shrunk
from aatc_cli.methods.registry import table_makers, transform_of
from aatc_cli.models.placement import find_device
from aatc_cli.stages.ahead import ahead, streaming, workers_of
from aatc_cli.stages.predicting.layers import predicted_layers


def write_transform(target: Path, basis: Stats, rates: Stats, settings: WhitenSettings, device: str) -> Manifest:
    """Compute a Transform on ``device`` and write it to ``target``, layer by layer.

    Raises `AatcError` for a device that is not there.
    """
    place = find_device(device)
    count, same = rates.geometry.layers, basis.digest == rates.digest

    def whitened(layer: int) -> WhitenedLayer:
        rate_layer = rates.layer(layer)
        basis_layer = rate_layer if same else basis.layer(layer)
        found = whiten_layer(basis_layer, rate_layer, settings, place)
        return _with_window(found, rates)

    def joint() -> Iterator[tuple[str, Tensor]]:
        if transform_of(settings.transform).over_layers:
            layers = [_rows_alone(basis.layer(layer)) for layer in range(count)]
            for side in SIDES:
                tables = _joint_tables(layers, side, settings)
                yield from ((f"{side}.{name}", tensor) for name, tensor in tables.items())

    with progress("whiten", count) as ticker:

        def layers() -> Iterator[WhitenedLayer]:
            every: Iterator[WhitenedLayer] = ahead(whitened, count, workers_of(place))
            if settings.prediction is not None:
                every = (_with_window(found, rates) for found in predicted_layers(rates, settings, place))
            for found in every:
                yield found
                ticker.advance()

        return Transform.write(target, settings, basis, rates, layers(), joint(), device=str(place))


def _with_window(found: WhitenedLayer, rates: Stats) -> WhitenedLayer:
    """A layer that also says behind which window its tokens were ranked, where they were."""
    window = rates.settings.window
    if "k.ranks" in found.tables:
        ranked = (window.sinks, tile_lags(window.recent)[1])
        found.tables["tile_window"] = torch.tensor(ranked, dtype=torch.float64)
    return found


def whiten_layer(basis: LayerStats, rates: LayerStats, settings: WhitenSettings, device: torch.device) -> WhitenedLayer:
    """Both sites of a layer, computed on ``device``.

    Tables of published methods are made on the CPU, but those that are fitted at length.
    """
    with streaming(device):
        rate_layer = rates.to(device)
        basis_layer = rate_layer if basis is rates else basis.to(device)
        sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]] = {}
        tables: dict[str, Tensor] = {}
        for side in SIDES:
            codec, weight, loss_weight = site_transform(side, basis_layer, rate_layer, settings)
            sites[side] = codec.to("cpu", torch.float64), weight.cpu(), loss_weight.cpu()
            for stats, encode, fitted in ((rates, sites[side][0].encode, False), (rate_layer, codec.encode, True)):
                found = _site_tables(side, stats, encode, settings, fitted=fitted)
                tables |= {f"{side}.{name}": tensor.cpu() for name, tensor in found.items()}
            if rates.ranked:
                tables[f"{side}.ranks"] = rate_layer.rank_costs(side, codec.decode, settings.shrinkage).cpu()
    return WhitenedLayer(sites, tables)


def _rows_alone(stats: LayerStats) -> LayerStats:
    """Stats without their matrices, which are most of them: a transform over all layers needs all rows at once."""
    none = torch.zeros(0, 0, dtype=torch.float64)
    return replace(stats, k_outer=none, v_outer=none, k_fisher=none, v_fisher=none, q_outer=none, o_gram=none)


def _site_tables(
    side: Side, stats: LayerStats, encode: Tensor, settings: WhitenSettings, *, fitted: bool
) -> dict[str, Tensor]:
    """Tensors of one site by name, of the transform and of all who read tables from it. encode [groups, E, E].

    fitted: those that are fitted at length, or all others.
    """
    transform = transform_of(settings.transform)
    latents: Callable[[], Tensor] = cache(lambda: transform.latents(side, stats, encode))
    found = {} if fitted else transform.tables(side, stats)
    for maker in table_makers(settings.transform, settings.tables):
        if not transform.over_layers and maker.fitted is fitted:
            found |= maker.tables(side, stats, latents, int(encode.shape[0]))
    return found


def _joint_tables(layers: Sequence[LayerStats], side: Side, settings: WhitenSettings) -> dict[str, Tensor]:
    """Tensors of one side over all layers by name."""
    found, latents = transform_of(settings.transform).joint(layers, side)
    for maker in table_makers(settings.transform, settings.tables):
        found |= maker.joint_tables(latents)
    return found


def site_transform(
    side: Side, basis: LayerStats, rates: LayerStats, settings: WhitenSettings
) -> tuple[TransformCodec, Tensor, Tensor]:
    """Transform of one site and two weights [C]: the paper's (query energy or W_O norms) and the Fisher one.

    The Fisher weight is zero everywhere when no gradients were collected.
    """
    transform = transform_of(settings.transform)
    rows = transform.rows(side, rates)
    groups = settings.head_groups.of(side)
    alike = basis is rates
    rate_moment, rate_metric = transform.moment(side, rates), shrunk(rates.loss_metric(side), settings.shrinkage)
    moment = transform.basis_moment(side, basis, rate_moment if alike else transform.moment(side, basis))
    metric = rate_metric if alike else shrunk(basis.loss_metric(side), settings.shrinkage)
    found = transform.matrices(_blocks(moment, groups), _blocks(metric, groups))
    encode, decode = found.encode, found.decode
    variance = latent_variance(encode, rate_moment)
    form = rates.q_outer / rates.count if side == "k" else rates.o_gram
    weight = quadratic_weights(decode, form)
    scale = channel_scales(encode, rows, variance, settings.percentile)
    bits = torch.zeros(variance.numel(), dtype=torch.int64, device=variance.device)
    loss_weight = fisher_weights(decode, rate_metric)
    return TransformCodec(encode, decode, scale, bits, variance), weight, loss_weight


def _blocks(matrix: Tensor, groups: int) -> Tensor:
    """Diagonal blocks [G, E, E] of a site's matrix [C, C]."""
    return torch.stack(group_moments(matrix, groups))
