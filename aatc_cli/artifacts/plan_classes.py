"""Classes of tokens in a Plan: thresholds of received attention, shares, and one class where a recipe has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter
from aatc_cli.methods.recipe import Recipe

if TYPE_CHECKING:
    from aatc_cli.core.token_classes import TokenClasses


class ClassFacts(BaseModel):
    """What a Plan says of one class, on average over layers: its share of tokens, and what noise in them costs."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    share: float
    key_cost: float
    value_cost: float


@dataclass(frozen=True)
class PlanClasses:
    """The classes of a Plan: thresholds [L, n - 1] of received attention, and shares [L, n] on calibration text.

    Quotas have no thresholds, [L, 0]. A Plan of a recipe without token rates has one class, which holds all tokens.
    """

    thresholds: NDArray[np.float64]
    shares: NDArray[np.float64]

    @classmethod
    def one(cls, layers: int) -> PlanClasses:
        """All tokens in one class."""
        return cls(np.zeros((layers, 0)), np.ones((layers, 1)))

    @classmethod
    def read(cls, plan: Artifact, recipe: Recipe) -> PlanClasses:
        """The classes of a Plan of ``recipe``; raises `ArtifactError` on values that cannot be."""
        layers = plan.manifest.model.geometry.layers
        kind = recipe.choices.classes
        count = kind.count(recipe)
        if not kind.measured:
            return cls(np.zeros((layers, 0)), np.tile(np.array(kind.shares(recipe)), (layers, 1)))
        parts: list[list[NDArray[np.float64]]] = []
        for layer in range(layers):
            thresholds, shares = (plan.array(f"layers.{layer}.{name}") for name in ("thresholds", "shares"))
            fits = thresholds.dtype == shares.dtype == np.float64 and shares.shape == (count,)
            fits = fits and thresholds.shape == (count - 1,) and bool((np.diff(thresholds) > 0).all())
            if not fits or not bool((shares > 0).all()) or abs(float(shares.sum()) - 1) > 1e-9:
                raise plan.damaged(f"the token classes of layer {layer} are out of range")
            parts.append([thresholds, shares])
        return cls(np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts]))

    @property
    def count(self) -> int:
        """Classes of every layer."""
        return int(self.shares.shape[1])

    def require(self, plan: Artifact, derived: TokenClasses) -> None:
        """Raise `ArtifactError` unless thresholds and shares of ``plan`` are those derived anew."""
        for what, old, new in (
            ("thresholds", self.thresholds, derived.thresholds),
            ("shares", self.shares, derived.shares),
        ):
            if not np.array_equal(old, new):
                layer = int(np.flatnonzero((old != new).any(1))[0])
                raise plan.damaged(f"the {what} of layer {layer} are not those of its transform")


def write_classes(writer: ArtifactWriter, classes: TokenClasses) -> list[dict[str, float]]:
    """Add thresholds and shares to a Plan; what its results say of every class, on average over layers."""
    for layer, (thresholds, shares) in enumerate(zip(classes.thresholds, classes.shares, strict=True)):
        if thresholds.size:
            writer.add(f"layers.{layer}.thresholds", thresholds)
            writer.add(f"layers.{layer}.shares", shares)
    parts = {"share": classes.shares, "key_cost": classes.costs["k"], "value_cost": classes.costs["v"]}
    # nine digits, as of all results: the last ones of a mean may differ between machines
    return [
        {name: float(f"{float(part[:, k].mean()):.9g}") for name, part in parts.items()}
        for k in range(classes.counts.shape[1])
    ]
