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
from aatc_cli.core.transform import GroupTransform, group_moments, identity, whitening
from aatc_cli.core.weights import channel_scales, latent_variance, quadratic_weights
from aatc_cli.errors import UsageError
from aatc_cli.profiles import dump
from aatc_cli.stages.files import Run, load_layer_stats, open_stats, write_site
from aatc_cli.stages.versions import versions


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: Literal["whiten", "identity"] = "whiten"
    head_groups: int = Field(1, ge=1, description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")


def whiten(
    run: Run, *, transform_stats: Path, rate_stats: Path, transform: Literal["whiten", "identity"] = "whiten",
    head_groups: int | None = None, percentile: float = 99.0, force: bool = False,
) -> Manifest:  # fmt: skip
    """Make the Transform of ``run`` from Stats: the matrices from one, variances, weights and scales from the other.

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
    settings = WhitenSettings(transform=transform, head_groups=groups, percentile=percentile)
    inputs = {"transform_stats": basis.manifest.digest, "rate_stats": rates.manifest.digest}
    target = run.transform(transform)
    with run.lock():
        wanted = {"settings": dump(settings), "inputs": inputs, "model": rates.manifest.model.model_dump(mode="json")}
        existing = unchanged(target, "transform", wanted, force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, inputs)
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {groups} head groups -> {target}")
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
                codec, weight = site_transform(side, basis_layer, rate_layer, settings)
                write_site(writer, layer, side, codec, weight)
            ticker.advance()
        return writer.commit(
            settings=dump(settings), model=model, inputs=inputs, texts=rates.manifest.texts,
            results={"tokens": rates.manifest.results["tokens"]}, provenance={"versions": versions()},
        )  # fmt: skip


def site_transform(
    side: Side, basis: LayerStats, rates: LayerStats, settings: WhitenSettings
) -> tuple[TransformCodec, Tensor]:
    """Transform of one site and its attention-aware weights [C]: query energy for keys, W_O norms for values."""
    outer, rate_outer = (basis.k_outer, rates.k_outer) if side == "k" else (basis.v_outer, rates.v_outer)
    rows = rates.k_rows if side == "k" else rates.v_rows
    parts = [_group(moment, settings) for moment in group_moments(outer / basis.count, settings.head_groups)]
    encode = torch.stack([part.encode for part in parts])
    decode = torch.stack([part.decode for part in parts])
    variance = latent_variance(encode, rate_outer / rates.count)
    form = rates.q_outer / rates.count if side == "k" else rates.o_gram
    weight = quadratic_weights(decode, form)
    scale = channel_scales(encode, rows, variance, settings.percentile)
    bits = torch.zeros(variance.numel(), dtype=torch.int64)
    return TransformCodec(encode, decode, scale, bits, variance), weight


def _group(moment: Tensor, settings: WhitenSettings) -> GroupTransform:
    return whitening(moment) if settings.transform == "whiten" else identity(moment.shape[0])
