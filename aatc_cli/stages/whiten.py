"""whiten: algebra on Stats; encode and decode matrices, latent variances, weights and channel scales.

What it is to make is settled here, without torch; `stages.whitening` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.manifest import Manifest, require_model
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform, WhitenSettings
from aatc_cli.config import HeadGroups
from aatc_cli.console import say
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.methods.fields import GroupChoice, chosen_groups
from aatc_cli.methods.prediction_fields import PredictedCoding
from aatc_cli.methods.recipe import Recipe, transform_name
from aatc_cli.methods.registry import quantizer_of, transform_of


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
    prediction: PredictedCoding | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` for a percentile or a shrinkage that cannot be, before anything is read."""
        if not 0 < self.percentile <= 100:
            raise UsageError(f"--percentile must lie in (0, 100], got {self.percentile:g}", "the paper uses 99")
        if not 0 <= self.shrinkage <= 1:
            problem = f"--shrinkage must lie in [0, 1], got {self.shrinkage:g}"
            raise UsageError(problem, "0 keeps the metric as it was measured")

    @classmethod
    def by(cls, recipe: Recipe) -> Self:
        """What a recipe needs."""
        choices = recipe.choices
        coding = choices.prediction.coding(recipe)
        return cls(recipe.transform, recipe.key_groups, recipe.value_groups, choices.tables, prediction=coding)

    @property
    def name(self) -> str:
        """Folder of it in a run."""
        return transform_name(self.transform, self.key_groups, self.value_groups, self.tables, self.prediction)

    def settings(self, kv_heads: int, profile_groups: int) -> WhitenSettings:
        """The settings on a model of ``kv_heads``; raises `UsageError` for head groups that do not divide them."""
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
            prediction=self.prediction,
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
    if device != "cpu":
        # looked for also where nothing is to be done, which then costs the import of torch
        from aatc_cli.models.placement import find_device

        find_device(device)
    basis, rates = Stats.open(transform_stats), Stats.open(rate_stats)
    require_model(basis.model, rates.model, str(rate_stats))
    geometry = rates.geometry
    settings = asked.settings(geometry.kv_heads, rates.settings.head_groups)
    _require_gradients(settings, basis, rates)
    _require_cross(settings, basis, rates)
    target = run.transform(asked.name)
    with run.lock():
        existing = unchanged(target, "transform", Transform.wanted(settings, basis, rates), force=force)
        if existing is not None:
            say(f"whiten: inputs unchanged, nothing to do ({target})")
            return existing
        from aatc_cli.stages.whitening import write_transform

        manifest = write_transform(target, basis, rates, settings, device)
    described = settings.head_groups.described
    say(f"whiten: {2 * geometry.layers} sites of {geometry.channels} channels in {described} -> {target}")
    return manifest


def _require_cross(settings: WhitenSettings, basis: Stats, rates: Stats) -> None:
    """Raise `ArtifactError` where maps are fitted from products of layers that Stats do not hold."""
    if settings.prediction is None:
        return
    wanted = max(settings.prediction.form.layers, 1)
    if basis.digest != rates.digest:
        problem = "maps are fitted on the moments that transforms are made from: two collections do not go together"
        raise UsageError(problem, "give --rate-stats alone")
    if rates.settings.below < wanted:
        raise ArtifactError(
            f"{rates.path} holds products of each layer with {rates.settings.below} below, prediction reads {wanted}",
            f"collect with --below {wanted}, into the same run with --force",
        )


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
