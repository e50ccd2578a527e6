"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, Manifest, require_model, unchanged
from aatc_cli.artifacts.files import Run, load_layer_stats, open_stats, write_site
from aatc_cli.artifacts.token_plans import received_lags
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import HeadGroups, Settings
from aatc_cli.console import progress, say
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rated import received_table
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.transform import group_moments
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights, shrunk
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.methods.axes import Transform
from aatc_cli.methods.fields import GroupChoice, chosen_groups
from aatc_cli.methods.recipe import Recipe, transform_name
from aatc_cli.methods.registry import names, quantizer_of, table_makers, table_names, transform_of
from aatc_cli.models.placement import find_device
from aatc_cli.profiles import dump
from aatc_cli.stages.ahead import ahead, streaming, workers_of


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: str = "whiten"
    head_groups: HeadGroups = Field(HeadGroups.both(1), description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")
    shrinkage: float = Field(0.1, ge=0, le=1, description="share of the loss metric replaced by its diagonal")
    tables: tuple[str, ...] = Field((), strict=False, description="quantizers whose tables it holds; none not written")

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return data if self.tables else {key: part for key, part in data.items() if key != "tables"}

    @model_validator(mode="after")
    def _known(self) -> Self:
        for value, known in [(self.transform, names("transform")), *((name, table_names()) for name in self.tables)]:
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return self

    @property
    def made_by(self) -> Transform:
        """The transform as an object."""
        return transform_of(self.transform)


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
    basis, rates = open_stats(transform_stats), open_stats(rate_stats)
    require_model(basis.manifest.model, rates.manifest.model, str(rate_stats))
    geometry = rates.manifest.model.geometry
    settings = asked.settings(geometry.kv_heads, int(rates.manifest.settings["head_groups"]))
    _require_gradients(settings, basis, rates)
    inputs = {"transform_stats": basis.manifest.digest, "rate_stats": rates.manifest.digest}
    target = run.transform(asked.name)
    with run.lock():
        content = {"settings": dump(settings), "inputs": inputs, "model": rates.manifest.model.model_dump(mode="json")}
        existing = unchanged(target, "transform", content, force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, inputs, place)
    described = settings.head_groups.described
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {described} -> {target}")
    return manifest


def _require_gradients(settings: WhitenSettings, basis: Artifact, rates: Artifact) -> None:
    """Raise `ArtifactError` where matrices or tables are made from loss gradients that Stats do not hold."""
    needing = [(basis, f"{settings.transform} transform")] if settings.made_by.gradients else []
    needing += [(rates, f"{name} quantizer") for name in settings.tables if quantizer_of(name).gradients]
    for stats, what in needing:
        if not stats.manifest.results.get("fisher_windows"):
            raise ArtifactError(
                f"{stats.path} holds no loss gradients, which the {what} is made from",
                "collect with --fisher N (64 windows or more serve well), into the same run with --force",
            )


@dataclass(frozen=True)
class WhitenedLayer:
    """What `whiten` writes of one layer, on the CPU: the codec and two weights of each side, and tensors by name."""

    sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]]
    tables: dict[str, Tensor]


def _write(
    target: Path,
    basis: Artifact,
    rates: Artifact,
    settings: WhitenSettings,
    inputs: dict[str, str],
    device: torch.device,
) -> Manifest:
    model = rates.manifest.model
    watched = received_lags(rates)
    same = basis.manifest.digest == rates.manifest.digest

    def whitened(layer: int) -> WhitenedLayer:
        rate_layer = load_layer_stats(rates, layer)
        basis_layer = rate_layer if same else load_layer_stats(basis, layer)
        found = whiten_layer(basis_layer, rate_layer, settings, device, watched=bool(watched))
        return replace(found, tables={f"layers.{layer}.{name}": tensor for name, tensor in found.tables.items()})

    with ArtifactWriter(target, "transform") as writer, progress("whiten", model.geometry.layers) as ticker:
        for layer, found in enumerate(ahead(whitened, model.geometry.layers, workers_of(device))):
            for side in SIDES:
                write_site(writer, layer, side, *found.sites[side])
            for name, tensor in found.tables.items():
                writer.add(name, tensor)
            ticker.advance()
        if settings.made_by.over_layers:
            layers = [_rows_alone(load_layer_stats(basis, layer)) for layer in range(model.geometry.layers)]
            for side in SIDES:
                for name, tensor in _joint_tables(layers, side, settings).items():
                    writer.add(f"joint.{side}.{name}", tensor)
        return writer.commit(
            settings=dump(settings),
            model=model,
            inputs=inputs,
            texts=rates.manifest.texts,
            results={key: rates.manifest.results[key] for key in ("tokens", "fisher_windows")} | watched,
            provenance={"versions": versions(), "device": str(device)},
        )


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
    transform = settings.made_by
    latents: Callable[[], Tensor] = cache(lambda: transform.latents(side, stats, encode))
    found = transform.tables(side, stats)
    for maker in table_makers(settings.transform, settings.tables):
        if not transform.over_layers:
            found |= maker.tables(side, stats, latents, int(encode.shape[0]))
    return found


def _joint_tables(layers: Sequence[LayerStats], side: Side, settings: WhitenSettings) -> dict[str, Tensor]:
    """Tensors of one side over all layers by name."""
    found, latents = settings.made_by.joint(layers, side)
    for maker in table_makers(settings.transform, settings.tables):
        found |= maker.joint_tables(latents)
    return found


def site_transform(
    side: Side, basis: LayerStats, rates: LayerStats, settings: WhitenSettings
) -> tuple[TransformCodec, Tensor, Tensor]:
    """Transform of one site and two weights [C]: the paper's (query energy or W_O norms) and the Fisher one.

    The Fisher weight is zero everywhere when no gradients were collected.
    """
    transform = settings.made_by
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
