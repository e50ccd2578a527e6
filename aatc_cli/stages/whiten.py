"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from aatc_cli.artifact import Artifact, ArtifactWriter, Manifest, require_model, unchanged
from aatc_cli.config import Settings
from aatc_cli.console import progress, say
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.hadamard import hadamard, random_signs
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.token_classes import received_table
from aatc_cli.core.transform import GroupTransform, canonical_basis, group_moments, identity, loss_metric, whitening
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights, shrunk
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.profiles import GroupChoice, HeadGroups, dump, transform_name
from aatc_cli.stages.files import Run, load_layer_stats, open_stats, write_site
from aatc_cli.stages.method_tables import joint_tables, site_mean, site_tables
from aatc_cli.stages.token_plans import received_lags
from aatc_cli.stages.versions import versions

TransformKind = Literal["whiten", "metric", "identity", "hadamard", "query", "pca", "codebook", "global"]


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: TransformKind = "whiten"
    head_groups: HeadGroups = Field(HeadGroups.both(1), description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")
    shrinkage: float = Field(0.1, ge=0, le=1, description="share of the loss metric replaced by its diagonal")


def whiten(
    run: Run, *, transform_stats: Path, rate_stats: Path, transform: TransformKind = "whiten",
    head_groups: int | None = None, key_groups: GroupChoice = "profile", value_groups: GroupChoice = "profile",
    percentile: float = 99.0, shrinkage: float = 0.1, force: bool = False,
) -> Manifest:  # fmt: skip
    """Make the Transform of ``run`` from Stats: the matrices from one, variances, weights and scales from the other.

    ``head_groups`` stands in for the number of the profile, which the choice "profile" takes.
    Raises `ArtifactError` for Stats that are missing, damaged or of two models, `UsageError` for head groups that do
    not divide the kv heads.
    """
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
    chosen = HeadGroups.chosen(key_groups, value_groups, geometry.kv_heads, HeadGroups.both(groups))
    settings = WhitenSettings(transform=transform, head_groups=chosen, percentile=percentile, shrinkage=shrinkage)
    inputs = {"transform_stats": basis.manifest.digest, "rate_stats": rates.manifest.digest}
    target = run.transform(transform_name(transform, key_groups, value_groups))
    with run.lock():
        wanted = {"settings": dump(settings), "inputs": inputs, "model": rates.manifest.model.model_dump(mode="json")}
        existing = unchanged(target, "transform", wanted, force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, inputs)
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {chosen.described} -> {target}")
    return manifest


def _write(
    target: Path, basis: Artifact, rates: Artifact, settings: WhitenSettings, inputs: dict[str, str]
) -> Manifest:
    same = basis.manifest.digest == rates.manifest.digest
    model = rates.manifest.model
    watched = received_lags(rates)
    with ArtifactWriter(target, "transform") as writer, progress("whiten", model.geometry.layers) as ticker:
        for layer in range(model.geometry.layers):
            rate_layer = load_layer_stats(rates, layer)
            basis_layer = rate_layer if same else load_layer_stats(basis, layer)
            for side in SIDES:
                codec, *weights = site_transform(side, basis_layer, rate_layer, settings)
                write_site(writer, layer, side, codec, *weights)
                for name, tensor in site_tables(settings.transform, side, rate_layer, codec.encode).items():
                    writer.add(f"layers.{layer}.{side}.{name}", tensor)
            if watched:
                writer.add(f"layers.{layer}.received", received_table(rate_layer, settings.shrinkage))
            ticker.advance()
        if settings.transform == "global":
            layers = [_rows_alone(load_layer_stats(basis, layer)) for layer in range(model.geometry.layers)]
            for side in SIDES:
                for name, tensor in joint_tables(layers, side).items():
                    writer.add(f"joint.{side}.{name}", tensor)
        return writer.commit(
            settings=dump(settings), model=model, inputs=inputs, texts=rates.manifest.texts,
            results={key: rates.manifest.results[key] for key in ("tokens", "fisher_windows")} | watched,
            provenance={"versions": versions()},
        )  # fmt: skip


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
    outer, rate_outer = (basis.k_outer, rates.k_outer) if side == "k" else (basis.v_outer, rates.v_outer)
    rows = rates.k_rows if side == "k" else rates.v_rows
    groups = settings.head_groups.of(side)
    moment, rate_moment = outer / basis.count, rate_outer / rates.count
    if settings.transform == "pca":
        moment = moment - torch.outer(site_mean(side, basis), site_mean(side, basis))
        rate_moment = rate_moment - torch.outer(site_mean(side, rates), site_mean(side, rates))
    if settings.transform == "query" and side == "k":
        # the metric of a key's error is the query's own second moment; one head to a group
        moment = torch.block_diag(*(basis.q_outer / basis.count))  # type: ignore[no-untyped-call]
    metric, rate_metric = (shrunk(stats.loss_metric(side), settings.shrinkage) for stats in (basis, rates))
    moments, metrics = group_moments(moment, groups), group_moments(metric, groups)
    parts = [_group(*pair, settings) for pair in zip(moments, metrics, strict=True)]
    encode = torch.stack([part.encode for part in parts])
    decode = torch.stack([part.decode for part in parts])
    variance = latent_variance(encode, rate_moment)
    form = rates.q_outer / rates.count if side == "k" else rates.o_gram
    weight = quadratic_weights(decode, form)
    scale = channel_scales(encode, rows, variance, settings.percentile)
    bits = torch.zeros(variance.numel(), dtype=torch.int64)
    loss_weight = fisher_weights(decode, rate_metric)
    return TransformCodec(encode, decode, scale, bits, variance), weight, loss_weight


def _group(moment: Tensor, metric: Tensor, settings: WhitenSettings) -> GroupTransform:
    if settings.transform == "metric":
        return loss_metric(moment, metric)
    if settings.transform == "whiten":
        return whitening(moment)
    size = int(moment.shape[0])
    if settings.transform == "hadamard":
        return _rotation(random_signs(size)[:, None] * hadamard(size))
    if settings.transform == "query":
        return _rotation(_eigenvectors(moment) @ hadamard(size))
    return _rotation(_eigenvectors(moment)) if settings.transform == "pca" else identity(size)


def _eigenvectors(moment: Tensor) -> Tensor:
    """Canonical eigenvectors of a second moment [E, E] in falling order of their eigenvalues, as columns."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return canonical_basis(values.flip(0), vectors.flip(1))


def _rotation(matrix: Tensor) -> GroupTransform:
    """The transform that is an orthonormal matrix."""
    return GroupTransform(encode=matrix, decode=matrix.T.contiguous(), singular=torch.ones_like(matrix[0]))
