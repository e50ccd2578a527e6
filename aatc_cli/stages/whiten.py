"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, Manifest, require_model, unchanged
from aatc_cli.artifacts.files import Run, load_layer_stats, open_stats, write_site
from aatc_cli.artifacts.token_plans import received_lags
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import HeadGroups, Settings
from aatc_cli.console import progress, say
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.hadamard import hadamard, random_signs
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.token_classes import received_table
from aatc_cli.core.transform import GroupTransform, eigenbasis, group_moments, identity, loss_metric, whitening
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights, shrunk
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.methods.recipe import GroupChoice, chosen_groups, transform_name
from aatc_cli.models.placement import find_device
from aatc_cli.profiles import dump
from aatc_cli.stages.ahead import ahead, streaming, workers_of
from aatc_cli.stages.method_tables import joint_tables, site_mean, site_tables

TransformKind = Literal["whiten", "metric", "identity", "hadamard", "query", "pca", "codebook", "global"]


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: TransformKind = "whiten"
    head_groups: HeadGroups = Field(HeadGroups.both(1), description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")
    shrinkage: float = Field(0.1, ge=0, le=1, description="share of the loss metric replaced by its diagonal")


def whiten(
    run: Run,
    *,
    transform_stats: Path,
    rate_stats: Path,
    transform: TransformKind = "whiten",
    head_groups: int | None = None,
    key_groups: GroupChoice = "profile",
    value_groups: GroupChoice = "profile",
    percentile: float = 99.0,
    shrinkage: float = 0.1,
    device: str = "cpu",
    force: bool = False,
) -> Manifest:
    """Make the Transform of ``run`` from Stats: the matrices from one, variances, weights and scales from the other.

    ``head_groups`` stands in for the number of the profile, which the choice "profile" takes.
    Raises `ArtifactError` for Stats that are missing, damaged or of two models, `UsageError` for head groups that do
    not divide the kv heads, `AatcError` for a device that is not there.
    """
    place = find_device(device)
    basis, rates = open_stats(transform_stats), open_stats(rate_stats)
    require_model(basis.manifest.model, rates.manifest.model, str(rate_stats))
    geometry = rates.manifest.model.geometry
    groups = head_groups if head_groups is not None else int(rates.manifest.settings["head_groups"])
    if groups < 1 or geometry.kv_heads % groups:
        raise UsageError(
            f"--head-groups {groups} does not divide the model's {geometry.kv_heads} kv heads",
            f"use one of {[g for g in range(1, geometry.kv_heads + 1) if geometry.kv_heads % g == 0]}",
        )
    if transform in ("metric", "codebook") and not basis.manifest.results.get("fisher_windows"):
        raise ArtifactError(
            f"{basis.path} holds no loss gradients, which the {transform} transform is made from",
            "collect with --fisher N (64 windows or more serve well), into the same run with --force",
        )
    chosen = chosen_groups(key_groups, value_groups, geometry.kv_heads, HeadGroups.both(groups))
    settings = WhitenSettings(transform=transform, head_groups=chosen, percentile=percentile, shrinkage=shrinkage)
    inputs = {"transform_stats": basis.manifest.digest, "rate_stats": rates.manifest.digest}
    target = run.transform(transform_name(transform, key_groups, value_groups))
    with run.lock():
        wanted = {"settings": dump(settings), "inputs": inputs, "model": rates.manifest.model.model_dump(mode="json")}
        existing = unchanged(target, "transform", wanted, force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, inputs, place)
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {chosen.described} -> {target}")
    return manifest


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
        if settings.transform == "global":
            layers = [_rows_alone(load_layer_stats(basis, layer)) for layer in range(model.geometry.layers)]
            for side in SIDES:
                for name, tensor in joint_tables(layers, side).items():
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
            found = site_tables(settings.transform, side, rates, sites[side][0].encode)
            tables |= {f"{side}.{name}": tensor for name, tensor in found.items()}
        if watched:
            tables["received"] = received_table(rate_layer, settings.shrinkage).cpu()
    return WhitenedLayer(sites, tables)


def _rows_alone(stats: LayerStats) -> LayerStats:
    """Stats without their matrices, which are most of them: a transform over all layers needs all rows at once."""
    none = torch.zeros(0, 0, dtype=torch.float64)
    return replace(stats, k_outer=none, v_outer=none, k_fisher=none, v_fisher=none, q_outer=none, o_gram=none)


def site_transform(
    side: Side, basis: LayerStats, rates: LayerStats, settings: WhitenSettings
) -> tuple[TransformCodec, Tensor, Tensor]:
    """Transform of one site and two weights [C]: the paper's (query energy or W_O norms) and the Fisher one.

    The Fisher weight is zero everywhere when no gradients were collected.
    """
    rows = rates.k_rows if side == "k" else rates.v_rows
    groups = settings.head_groups.of(side)
    alike = basis is rates
    rate_moment, rate_metric = _moment(side, rates, settings), shrunk(rates.loss_metric(side), settings.shrinkage)
    moment = rate_moment if alike else _moment(side, basis, settings)
    metric = rate_metric if alike else shrunk(basis.loss_metric(side), settings.shrinkage)
    if settings.transform == "query" and side == "k":
        # the metric of a key's error is the query's own second moment; one head to a group
        moment = torch.block_diag(*(basis.q_outer / basis.count))  # type: ignore[no-untyped-call]
    found = _transform(_blocks(moment, groups), _blocks(metric, groups), settings)
    encode, decode = found.encode, found.decode
    variance = latent_variance(encode, rate_moment)
    form = rates.q_outer / rates.count if side == "k" else rates.o_gram
    weight = quadratic_weights(decode, form)
    scale = channel_scales(encode, rows, variance, settings.percentile)
    bits = torch.zeros(variance.numel(), dtype=torch.int64, device=variance.device)
    loss_weight = fisher_weights(decode, rate_metric)
    return TransformCodec(encode, decode, scale, bits, variance), weight, loss_weight


def _moment(side: Side, stats: LayerStats, settings: WhitenSettings) -> Tensor:
    moment = (stats.k_outer if side == "k" else stats.v_outer) / stats.count
    if settings.transform == "pca":
        moment = moment - torch.outer(site_mean(side, stats), site_mean(side, stats))
    return moment


def _blocks(matrix: Tensor, groups: int) -> Tensor:
    """Diagonal blocks [G, E, E] of a site's matrix [C, C]."""
    return torch.stack(group_moments(matrix, groups))


def _transform(moments: Tensor, metrics: Tensor, settings: WhitenSettings) -> GroupTransform:
    """The transforms of all groups of a site at once, from [G, E, E]."""
    if settings.transform == "metric":
        return loss_metric(moments, metrics)
    if settings.transform == "whiten":
        return whitening(moments)
    if settings.transform == "pca":
        return _rotation(eigenbasis(moments))
    size = int(moments.shape[-1])
    if settings.transform == "hadamard":
        return _rotation((random_signs(size)[:, None] * hadamard(size)).to(moments).expand_as(moments))
    if settings.transform == "query":
        return _rotation(eigenbasis(moments) @ hadamard(size).to(moments))
    return _rotation(identity(size).encode.to(moments).expand_as(moments))


def _rotation(matrices: Tensor) -> GroupTransform:
    """The transforms that are orthonormal matrices [G, E, E]."""
    return GroupTransform(matrices.contiguous(), matrices.mT.contiguous(), torch.ones_like(matrices[..., 0]))
