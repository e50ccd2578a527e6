"""Where artifacts lie in a run directory, and how their tensors map to what the mathematics works on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aatc_cli.artifact import Artifact, ArtifactWriter, damaged, open_artifact
from aatc_cli.config import Budget, Geometry
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Energies, SiteEnergy
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.profiles import Recipe

_SITE_TENSORS = ("encode", "decode", "variance", "weight", "scale")


@dataclass(frozen=True)
class Run:
    """A run directory and the places of its artifacts."""

    root: Path

    def stats(self, name: str = "stats") -> Path:
        """Directory of the Stats called ``name``."""
        return self.root / name

    def transform(self, kind: str) -> Path:
        """Directory of the Transform of one kind ("whiten", "identity")."""
        return self.root / "transforms" / kind

    def plan(self, recipe: str, budget: Budget) -> Path:
        """Directory of the Plan of a recipe at a budget."""
        return self.root / "plans" / f"{recipe}-{budget.label}"

    def plans(self) -> list[Path]:
        """Directories of all plans, in name order."""
        folder = self.root / "plans"
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    @property
    def evals(self) -> Path:
        """Folder of the evaluation files."""
        return self.root / "evals"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.root / "report"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; raises `AatcError` naming the process that already does."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                handle.seek(0)
                owner = handle.read().strip() or "another process"
                raise AatcError(
                    f"{self.root} is being written by process {owner}", "wait for it, or use another --run directory"
                ) from error
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            for folder in (self.root, self.root / "plans", self.root / "transforms"):
                _sweep(folder)
            yield


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written; bring back an artifact it had just moved aside."""
    for leftover in [*folder.glob(".*.tmp-*"), *folder.glob(".*.old-*")]:
        name = leftover.name[1:].rsplit(".", 1)[0]
        if ".old-" in leftover.name and not (folder / name).exists():
            os.rename(leftover, folder / name)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def load_layer_stats(artifact: Artifact, layer: int) -> LayerStats:
    """The accumulated sums of one layer of a Stats."""
    parts = {name: artifact.tensor(f"layers.{layer}.{name}") for name in LayerStats.TENSORS}
    count = artifact.manifest.results.get("tokens")
    if not isinstance(count, int) or count < 1:
        raise damaged(artifact.path, "stats", "it has no token count")
    return LayerStats(count=count, filled=int(parts["k_rows"].shape[0]), **parts)


def write_site(writer: ArtifactWriter, layer: int, side: Side, codec: TransformCodec, weight: Tensor) -> None:
    """Add one site of a Transform: matrices and scales in float32, variances and weights in float64."""
    name = f"layers.{layer}.{side}"
    writer.add(f"{name}.encode", codec.encode.to(torch.float32))
    writer.add(f"{name}.decode", codec.decode.to(torch.float32))
    writer.add(f"{name}.scale", codec.scale.to(torch.float32))
    writer.add(f"{name}.variance", codec.variance.to(torch.float64))
    writer.add(f"{name}.weight", weight.to(torch.float64))


def load_energies(transform: Artifact) -> Energies:
    """Latent variances and weights of every site, for allocation."""
    energies: Energies = []
    for layer in range(transform.manifest.model.geometry.layers):
        sites: dict[Side, SiteEnergy] = {}
        for side in SIDES:
            variance = transform.tensor(f"layers.{layer}.{side}.variance").numpy().astype(np.float64)
            weight = transform.tensor(f"layers.{layer}.{side}.weight").numpy().astype(np.float64)
            sites[side] = SiteEnergy(variance=variance, weight=weight)
        energies.append(sites)
    return energies


@dataclass(frozen=True)
class Plan:
    """A Plan as the run time reads it: its recipe, budget, widths and the Transform it belongs to."""

    artifact: Artifact
    recipe: Recipe
    budget: Budget
    bits: list[Mapping[Side, list[int]]]
    groups: int

    @property
    def name(self) -> str:
        """Recipe and budget: ``paper-2``."""
        return f"{self.recipe.name}-{self.budget.label}"

    @property
    def geometry(self) -> Geometry:
        """Cache geometry of the model it was made for."""
        return self.artifact.manifest.model.geometry

    @property
    def layout(self) -> CacheLayout:
        """The byte law at this plan's widths."""
        return CacheLayout.of_bits(self.geometry, self.recipe.window, self.groups, self.bits)

    @property
    def mean_bits(self) -> float:
        """Mean code bits per channel over keys and values."""
        widths = [width for layer in self.bits for side in SIDES for width in layer[side]]
        return sum(widths) / len(widths)


def open_plan(path: Path) -> Plan:
    """Read a Plan; raises `ArtifactError` when it is absent or damaged."""
    artifact = open_artifact(path, "plan")
    try:
        settings = artifact.manifest.settings
        recipe, budget = Recipe.model_validate(settings["recipe"]), Budget.model_validate(settings["budget"])
        groups = int(artifact.manifest.results["head_groups"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, "plan", "its settings are not those of a plan") from error
    geometry = artifact.manifest.model.geometry
    bits: list[Mapping[Side, list[int]]] = []
    for layer in range(geometry.layers):
        widths = {side: artifact.tensor(f"layers.{layer}.{side}.bits") for side in SIDES}
        for side, tensor in widths.items():
            if tuple(tensor.shape) != (geometry.channels,) or int(tensor.max()) > recipe.max_bits:
                raise damaged(path, "plan", f"the widths of layer {layer} {side} are out of range")
        bits.append({side: tensor.tolist() for side, tensor in widths.items()})
    return Plan(artifact, recipe, budget, bits, groups)


def transform_of(plan: Plan, path: Path | None = None) -> Artifact:
    """The Transform a plan was made from, beside it in the run or at ``path``; raises `ArtifactError`."""
    place = path or plan.artifact.path.parent.parent / "transforms" / plan.recipe.transform
    transform = open_artifact(place, "transform")
    if transform.manifest.digest != plan.artifact.manifest.inputs.get("transform"):
        raise ArtifactError(
            f"{plan.artifact.path} was not made from the transform at {place}",
            "run aatc allocate --force to plan for this transform, or give the right one with --transform",
        )
    return transform


def load_codecs(plan: Plan, transform: Artifact, device: str) -> list[dict[Side, TransformCodec]]:
    """One float32 codec per layer and side on ``device``; raises `ArtifactError` on values no codec can have."""
    codecs: list[dict[Side, TransformCodec]] = []
    for layer, widths in enumerate(plan.bits):
        sites: dict[Side, TransformCodec] = {}
        for side in SIDES:
            parts = {part: transform.tensor(f"layers.{layer}.{side}.{part}") for part in _SITE_TENSORS}
            if any(not bool(torch.isfinite(t).all()) for t in parts.values()) or bool((parts["scale"] <= 0).any()):
                raise damaged(transform.path, "transform", f"layer {layer} {side} has a scale or matrix that is not usable")
            codec = TransformCodec(
                parts["encode"], parts["decode"], parts["scale"], torch.tensor(widths[side]), parts["variance"]
            )
            sites[side] = codec.to(device)
        codecs.append(sites)
    return codecs
