"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.manifest import Manifest, require_model
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform, TransformKind, WhitenedLayer, WhitenSettings
from aatc_cli.config import HeadGroups
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
from aatc_cli.stages.ahead import ahead, streaming, workers_of
from aatc_cli.stages.method_tables import joint_tables, site_mean, site_tables


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
    basis, rates = Stats.open(transform_stats), Stats.open(rate_stats)
    require_model(basis.model, rates.model, str(rate_stats))
    geometry = rates.geometry
    groups = head_groups if head_groups is not None else rates.settings.head_groups
    if groups < 1 or geometry.kv_heads % groups:
        raise UsageError(
            f"--head-groups {groups} does not divide the model's {geometry.kv_heads} kv heads",
            f"use one of {[g for g in range(1, geometry.kv_heads + 1) if geometry.kv_heads % g == 0]}",
        )
    if transform in ("metric", "codebook") and not basis.fisher_windows:
        raise ArtifactError(
            f"{basis.path} holds no loss gradients, which the {transform} transform is made from",
            "collect with --fisher N (64 windows or more serve well), into the same run with --force",
        )
    chosen = chosen_groups(key_groups, value_groups, geometry.kv_heads, HeadGroups.both(groups))
    settings = WhitenSettings(transform=transform, head_groups=chosen, percentile=percentile, shrinkage=shrinkage)
    target = run.transform(transform_name(transform, key_groups, value_groups))
    with run.lock():
        existing = unchanged(target, "transform", Transform.wanted(settings, basis, rates), force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        manifest = _write(target, basis, rates, settings, place)
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {chosen.described} -> {target}")
    return manifest


def _write(target: Path, basis: Stats, rates: Stats, settings: WhitenSettings, device: torch.device) -> Manifest:
    count, same, watched = rates.geometry.layers, basis.digest == rates.digest, rates.received_lags is not None

    def whitened(layer: int) -> WhitenedLayer:
        rate_layer = rates.layer(layer)
        basis_layer = rate_layer if same else basis.layer(layer)
        return whiten_layer(basis_layer, rate_layer, settings, device, watched=watched)

    def joint() -> Iterator[tuple[str, Tensor]]:
        if settings.transform == "global":
            layers = [_rows_alone(basis.layer(layer)) for layer in range(count)]
            for side in SIDES:
                yield from ((f"{side}.{name}", tensor) for name, tensor in joint_tables(layers, side).items())

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
