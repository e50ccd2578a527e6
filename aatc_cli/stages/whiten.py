"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

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
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.transform import GroupTransform, group_moments, identity, loss_metric, whitening
from aatc_cli.core.weights import channel_scales, fisher_weights, latent_variance, quadratic_weights
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.profiles import GroupChoice, HeadGroups, dump, transform_name
from aatc_cli.stages.files import Run, load_layer_stats, open_stats, write_site
from aatc_cli.stages.versions import versions

TransformKind = Literal["whiten", "metric", "identity"]


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: TransformKind = "whiten"
    head_groups: HeadGroups = Field(HeadGroups.both(1), description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")


def whiten(
    run: Run, *, transform_stats: Path, rate_stats: Path, transform: TransformKind = "whiten",
    head_groups: int | None = None, key_groups: GroupChoice = "profile", value_groups: GroupChoice = "profile",
    percentile: float = 99.0, force: bool = False,
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
    if transform == "metric" and not basis.manifest.results.get("fisher_windows"):
        raise ArtifactError(
            f"{basis.path} holds no loss gradients, which the metric transform is made from",
            "collect with --fisher N (64 windows or more serve well), into the same run with --force",
        )
    chosen = HeadGroups.chosen(key_groups, value_groups, geometry.kv_heads, HeadGroups.both(groups))
    settings = WhitenSettings(transform=transform, head_groups=chosen, percentile=percentile)
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
    with ArtifactWriter(target, "transform") as writer, progress("whiten", model.geometry.layers) as ticker:
        for layer in range(model.geometry.layers):
            rate_layer = load_layer_stats(rates, layer)
            basis_layer = rate_layer if same else load_layer_stats(basis, layer)
            for side in SIDES:
                write_site(writer, layer, side, *site_transform(side, basis_layer, rate_layer, settings))
            ticker.advance()
        return writer.commit(
            settings=dump(settings), model=model, inputs=inputs, texts=rates.manifest.texts,
            results={key: rates.manifest.results[key] for key in ("tokens", "fisher_windows")},
            provenance={"versions": versions()},
        )  # fmt: skip


def site_transform(
    side: Side, basis: LayerStats, rates: LayerStats, settings: WhitenSettings
) -> tuple[TransformCodec, Tensor, Tensor]:
    """Transform of one site and two weights [C]: the paper's (query energy or W_O norms) and the Fisher one.

    The Fisher weight is zero everywhere when no gradients were collected.
    """
    outer, rate_outer = (basis.k_outer, rates.k_outer) if side == "k" else (basis.v_outer, rates.v_outer)
    rows = rates.k_rows if side == "k" else rates.v_rows
    groups = settings.head_groups.of(side)
    moments, metrics = group_moments(outer / basis.count, groups), group_moments(basis.loss_metric(side), groups)
    parts = [_group(moment, metric, settings) for moment, metric in zip(moments, metrics, strict=True)]
    encode = torch.stack([part.encode for part in parts])
    decode = torch.stack([part.decode for part in parts])
    variance = latent_variance(encode, rate_outer / rates.count)
    form = rates.q_outer / rates.count if side == "k" else rates.o_gram
    weight = quadratic_weights(decode, form)
    scale = channel_scales(encode, rows, variance, settings.percentile)
    bits = torch.zeros(variance.numel(), dtype=torch.int64)
    loss_weight = fisher_weights(decode, rates.loss_metric(side))
    return TransformCodec(encode, decode, scale, bits, variance), weight, loss_weight


def _group(moment: Tensor, metric: Tensor, settings: WhitenSettings) -> GroupTransform:
    if settings.transform == "metric":
        return loss_metric(moment, metric)
    return whitening(moment) if settings.transform == "whiten" else identity(moment.shape[0])
