"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.manifest import Manifest, require_model
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform, WhitenedLayer, WhitenSettings
from aatc_cli.config import HeadGroups
from aatc_cli.console import progress, say
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rated import received_table
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.transform import group_moments
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights, shrunk
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.methods.fields import GroupChoice, chosen_groups
from aatc_cli.methods.recipe import Recipe, transform_name
from aatc_cli.methods.registry import quantizer_of, table_makers, transform_of
from aatc_cli.models.placement import find_device
from aatc_cli.stages.ahead import ahead, streaming, workers_of


@dataclass(frozen=True)
class Wanted:
    """Which Transform is to be made: its kind, its head groups by choice, and the quantizers it holds tables of.

    ``head_groups`` stands in for the number of the profile, which the choice "profile" takes.
    """

    transform: str = "whiten"
    key_groups: GroupChoice = "profile"
    value_groups: GroupChoice = "profile"
    tables: tuple[str, ...] = ()
    head_groups: int | None = None
    percentile: float = 99.0
    shrinkage: float = 0.1

    @classmethod
    def by(cls, recipe: Recipe) -> Self:
        """What a recipe needs."""
        return cls(recipe.transform, recipe.key_groups, recipe.value_groups, recipe.choices.tables)

    @property
    def name(self) -> str:
        """Folder of it in a run."""
        return transform_name(self.transform, self.key_groups, self.value_groups, self.tables)

    def settings(self, kv_heads: int, profile_groups: int) -> WhitenSettings:
        """The settings on a model of ``kv_heads``; raises `UsageError` for head groups that do not divide them."""
        if not 0 < self.percentile <= 100:
            raise UsageError(f"--percentile must lie in (0, 100], got {self.percentile:g}", "the paper uses 99")
        if not 0 <= self.shrinkage <= 1:
            problem = f"--shrinkage must lie in [0, 1], got {self.shrinkage:g}"
            raise UsageError(problem, "0 keeps the metric as it was measured")
        groups = self.head_groups if self.head_groups is not None else profile_groups
        if groups < 1 or kv_heads % groups:
            raise UsageError(
                f"--head-groups {groups} does not divide the model's {kv_heads} kv heads",
                f"use one of {[g for g in range(1, kv_heads + 1) if kv_heads % g == 0]}",
            )
        chosen = chosen_groups(self.key_groups, self.value_groups, kv_heads, HeadGroups.both(groups))
        return WhitenSettings(
            transform=self.transform,
            head_groups=chosen,
            percentile=self.percentile,
            shrinkage=self.shrinkage,
            tables=self.tables,
        )


def whiten(
    run: Run,
    *,
    transform_stats: Path,
    rate_stats: Path,
    wanted: Wanted | None = None,
    device: str = "cpu",
    force: bool = False,
) -> Manifest:
    """Make a Transform of ``run`` from Stats: the matrices from one, variances, weights and scales from the other.

    Raises `ArtifactError` for Stats that are missing, damaged or of two models, `UsageError` for head groups that do
    not divide the kv heads, `AatcError` for a device that is not there.
    """
    asked = wanted or Wanted()
    place = find_device(device)
    basis, rates = Stats.open(transform_stats), Stats.open(rate_stats)
    require_model(basis.model, rates.model, str(rate_stats))
    geometry = rates.geometry
    settings = asked.settings(geometry.kv_heads, rates.settings.head_groups)
    _require_gradients(settings, basis, rates)
    target = run.transform(asked.name)
    with run.lock():
        existing = unchanged(target, "transform", Transform.wanted(settings, basis, rates), force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, place)
    described = settings.head_groups.described
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {described} -> {target}")
    return manifest


def _require_gradients(settings: WhitenSettings, basis: Stats, rates: Stats) -> None:
    """Raise `ArtifactError` where matrices or tables are made from loss gradients that Stats do not hold."""
    needing = [(basis, f"{settings.transform} transform")] if transform_of(settings.transform).gradients else []
    needing += [(rates, f"{name} quantizer") for name in settings.tables if quantizer_of(name).gradients]
    for stats, what in needing:
        if not stats.fisher_windows:
            raise ArtifactError(
                f"{stats.path} holds no loss gradients, which the {what} is made from",
                "collect with --fisher N (64 windows or more serve well), into the same run with --force",
            )


def _write(target: Path, basis: Stats, rates: Stats, settings: WhitenSettings, device: torch.device) -> Manifest:
    count, same, watched = rates.geometry.layers, basis.digest == rates.digest, rates.received_lags is not None

    def whitened(layer: int) -> WhitenedLayer:
        rate_layer = rates.layer(layer)
        basis_layer = rate_layer if same else basis.layer(layer)
        return whiten_layer(basis_layer, rate_layer, settings, device, watched=watched)

    def joint() -> Iterator[tuple[str, Tensor]]:
        if transform_of(settings.transform).over_layers:
            layers = [_rows_alone(basis.layer(layer)) for layer in range(count)]
            for side in SIDES:
                tables = _joint_tables(layers, side, settings)
                yield from ((f"{side}.{name}", tensor) for name, tensor in tables.items())

    with progress("whiten", count) as ticker:

        def layers() -> Iterator[WhitenedLayer]:
            for found in ahead(whitened, count, workers_of(device)):
                yield found
                ticker.advance()

        return Transform.write(target, settings, basis, rates, layers(), joint(), device=str(device))


def whiten_layer(
    basis: LayerStats, rates: LayerStats, settings: WhitenSettings, device: torch.device, *, watched: bool = False
) -> WhitenedLayer:
    """Both sites of a layer, computed on ``device``; with ``watched`` also what its tokens received.

    Tables of published methods are made on the CPU.
    """
    with streaming(device):
        rate_layer = rates.to(device)
        basis_layer = rate_layer if basis is rates else basis.to(device)
        sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]] = {}
        tables: dict[str, Tensor] = {}
        for side in SIDES:
            codec, weight, loss_weight = site_transform(side, basis_layer, rate_layer, settings)
            sites[side] = codec.to("cpu", torch.float64), weight.cpu(), loss_weight.cpu()
            found = _site_tables(side, rates, sites[side][0].encode, settings)
            tables |= {f"{side}.{name}": tensor for name, tensor in found.items()}
        if watched:
            tables["received"] = received_table(rate_layer, settings.shrinkage).cpu()
    return WhitenedLayer(sites, tables)


def _rows_alone(stats: LayerStats) -> LayerStats:
    """Stats without their matrices, which are most of them: a transform over all layers needs all rows at once."""
    none = torch.zeros(0, 0, dtype=torch.float64)
    return replace(stats, k_outer=none, v_outer=none, k_fisher=none, v_fisher=none, q_outer=none, o_gram=none)


def _site_tables(side: Side, stats: LayerStats, encode: Tensor, settings: WhitenSettings) -> dict[str, Tensor]:
    """Tensors of one site by name, of the transform and of all who read tables from it. encode [groups, E, E]."""
    transform = transform_of(settings.transform)
    latents: Callable[[], Tensor] = cache(lambda: transform.latents(side, stats, encode))
    found = transform.tables(side, stats)
    for maker in table_makers(settings.transform, settings.tables):
        if not transform.over_layers:
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
    rows = rates.k_rows if side == "k" else rates.v_rows
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
