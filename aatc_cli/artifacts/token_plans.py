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
from aatc_cli.core.rated import RatedCodec
from aatc_cli.core.received_bins import watched_lags
from aatc_cli.core.token_classes import Floats, TokenClasses
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


def load_classes(transform: Artifact, recipe: Recipe) -> TokenClasses | None:
    """The classes of a recipe with token rates; raises `ArtifactError` where the Transform cannot tell them."""
    choices, geometry = recipe.choices, transform.manifest.model.geometry
    found: TokenClasses | None = choices.classes.read(choices, transform, geometry, recorded_lags(transform))
    return found


def recorded_lags(transform: Artifact) -> tuple[int, int] | None:
    """First and last distance at which the Stats of a Transform watched attention; None where they did not."""
    recorded = transform.manifest.results.get("received_lags")
    return None if recorded is None else (recorded[0], recorded[1])


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
    count = recipe.choices.classes.count(recipe)
    if count == 1:
        return None
    layers = range(plan.manifest.model.geometry.layers)
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
