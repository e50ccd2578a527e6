"""Token classes on disk: from Stats to the Transform, from there into a Plan, and from a Plan to codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, damaged
from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.received import BINS, watched_lags
from aatc_cli.core.token_classes import Floats, RatedCodec, TokenClasses, token_classes
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.methods.recipe import Recipe


@dataclass(frozen=True)
class PlanClasses:
    """The classes of a Plan: thresholds [L, n - 1] of received attention, and shares [L, n] on calibration text."""

    thresholds: Floats
    shares: Floats

    @property
    def count(self) -> int:
        """Classes of every layer."""
        return int(self.shares.shape[1])


def received_lags(stats: Artifact) -> dict[str, Any]:
    """The result ``received_lags`` of a Transform of ``stats``, or nothing where no attention was watched."""
    if "layers.0.received" not in stats.manifest.tensors:
        return {}
    return {"received_lags": list(watched_lags(Window.model_validate(stats.manifest.settings["window"])))}


def load_classes(transform: Artifact, recipe: Recipe) -> TokenClasses:
    """The classes of a recipe with token rates; raises `ArtifactError` where the Transform cannot tell them."""
    assert recipe.tokens is not None
    recorded = transform.manifest.results.get("received_lags")
    if recorded is None:
        raise ArtifactError(
            f"{transform.path} does not say what attention tokens received, by which {recipe.name} chooses their rates",
            "collect with --fisher N and whiten again, both with --force",
        )
    lags = list(watched_lags(recipe.window))
    if recorded != lags:
        raise UsageError(
            f"recipe {recipe.name} watches tokens for {lags[0]} to {lags[1]} steps, "
            f"the calibration watched them for {recorded[0]} to {recorded[1]}",
            "give the recipe the window that collect has: 128 recent tokens, flushed 16 at a time",
        )
    return token_classes(
        [_table(transform, layer) for layer in range(transform.manifest.model.geometry.layers)], recipe.tokens.shares
    )


def _table(transform: Artifact, layer: int) -> Floats:
    table = transform.tensor(f"layers.{layer}.received")
    if table.dtype != torch.float64 or tuple(table.shape) != (3, BINS) or not bool(torch.isfinite(table).all()):
        raise damaged(transform.path, "transform", f"what tokens of layer {layer} received is no table of {BINS} bins")
    if bool((table[0] < 0).any()) or not bool(table[0].any()):
        raise damaged(transform.path, "transform", f"layer {layer} counts no tokens by what they received")
    return table.numpy()


def write_classes(writer: ArtifactWriter, classes: TokenClasses) -> list[dict[str, float]]:
    """Add thresholds and shares to a Plan; what its results say of every class, on average over layers."""
    for layer, (thresholds, shares) in enumerate(zip(classes.thresholds, classes.shares, strict=True)):
        writer.add(f"layers.{layer}.thresholds", torch.from_numpy(thresholds.copy()))
        writer.add(f"layers.{layer}.shares", torch.from_numpy(shares.copy()))
    parts = {"share": classes.shares, "key_cost": classes.costs["k"], "value_cost": classes.costs["v"]}
    # nine digits, as of all results: the last ones of a mean may differ between machines
    return [
        {name: float(f"{float(part[:, k].mean()):.9g}") for name, part in parts.items()}
        for k in range(classes.counts.shape[1])
    ]


def require_classes(plan: Artifact, planned: PlanClasses, derived: TokenClasses) -> None:
    """Raise `ArtifactError` unless a Plan's thresholds and shares are those derived anew."""
    for what, old, new in (
        ("thresholds", planned.thresholds, derived.thresholds),
        ("shares", planned.shares, derived.shares),
    ):
        if not np.array_equal(old, new):
            layer = int(np.flatnonzero((old != new).any(1))[0])
            raise damaged(plan.path, "plan", f"the {what} of layer {layer} are not those of its transform")


def read_classes(plan: Artifact, recipe: Recipe) -> PlanClasses | None:
    """The classes of a Plan, or None of a recipe without; raises `ArtifactError` on values that cannot be."""
    if recipe.tokens is None:
        return None
    count, layers = len(recipe.tokens.shares), range(plan.manifest.model.geometry.layers)
    parts: list[list[np.ndarray]] = []
    for layer in layers:
        thresholds, shares = (plan.tensor(f"layers.{layer}.{name}") for name in ("thresholds", "shares"))
        fits = thresholds.dtype == shares.dtype == torch.float64 and shares.shape == (count,)
        fits = fits and thresholds.shape == (count - 1,) and bool((thresholds.diff() > 0).all())
        if not fits or not bool((shares > 0).all()) or abs(float(shares.sum()) - 1) > 1e-9:
            raise damaged(plan.path, "plan", f"the token classes of layer {layer} are out of range")
        parts.append([thresholds.numpy(), shares.numpy()])
    return PlanClasses(np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts]))


def rated_codecs(
    classes: PlanClasses, codecs: Sequence[Sequence[dict[Side, TransformCodec]]], device: str
) -> list[dict[Side, RatedCodec]]:
    """One codec per layer and side that holds those of all classes: ``codecs[class][layer][side]``."""
    return [
        {
            side: RatedCodec(
                tuple(of_class[layer][side] for of_class in codecs), torch.from_numpy(thresholds.copy()).to(device)
            )
            for side in SIDES
        }
        for layer, thresholds in enumerate(classes.thresholds)
    ]
