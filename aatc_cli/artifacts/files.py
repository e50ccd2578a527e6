"""Where artifacts lie in a run directory, and how their tensors map to what the mathematics works on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from aatc_cli.artifacts.artifact import MANIFEST, Artifact, ArtifactWriter, damaged, open_artifact
from aatc_cli.artifacts.claims import check_plan, check_stats
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.token_plans import PlanClasses, rated_codecs, read_classes
from aatc_cli.config import Budget, Geometry, HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Energies, SiteEnergy
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.received import BINS, PROBES
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.token_classes import RatedCodec
from aatc_cli.core.token_layout import TokenLayout
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.methods.recipe import PACKED_QUANTIZERS, Recipe

_SITE_TENSORS = ("encode", "decode", "variance", "weight", "fisher", "scale")
_FOLDERS = ("transforms", "plans", "evals", "report", "stability", "studies")


@dataclass(frozen=True)
class Run:
    """A run directory and the places of its artifacts."""

    root: Path

    def stats(self, name: str = "stats") -> Path:
        """Directory of the Stats called ``name``; raises `UsageError` for a name that leads elsewhere."""
        if name in _FOLDERS or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is None:
            raise UsageError(
                f"{name!r} cannot be the name of Stats",
                f"use letters, digits, '.', '_' and '-', and none of {', '.join(_FOLDERS)}",
            )
        return self._own(self.root / name)

    def all_stats(self) -> list[Path]:
        """Directories of all finished Stats, in name order."""
        found = [path for path in _visible(self.root) if path.name not in _FOLDERS and (path / MANIFEST).is_file()]
        return [self._own(path) for path in found]

    def checkpoint(self, name: str) -> Path:
        """Directory of the checkpoint of the Stats called ``name``."""
        return self._own(self.root / f".{name}.partial")

    def transform(self, name: str) -> Path:
        """Directory of a Transform by its name (`methods.recipe.transform_name`: "whiten", "metric-keys-per-head")."""
        return self._own(self.root / "transforms" / name)

    def transforms(self) -> list[Path]:
        """Directories of all transforms, in name order."""
        return [self._own(path) for path in _visible(self.root / "transforms")]

    def plan(self, recipe: str, budget: Budget) -> Path:
        """Directory of the Plan of a recipe at a budget."""
        return self._own(self.root / "plans" / f"{recipe}-{budget.label}")

    def plans(self) -> list[Path]:
        """Directories of all plans, in name order."""
        return [self._own(path) for path in _visible(self.root / "plans")]

    @property
    def evals(self) -> Path:
        """Folder of the evaluation files."""
        return self._own(self.root / "evals")

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self._own(self.root / "report")

    def _own(self, path: Path) -> Path:
        """``path``; raises `ArtifactError` when symbolic links lead from it out of the run."""
        place, root = (Path(os.path.realpath(each)) for each in (path, self.root))
        if not place.is_relative_to(root):
            problem = f"{path} leads out of the run directory {self.root} by a symbolic link"
            raise ArtifactError(problem, "put the folder itself in its place, or name it by an option")
        return path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; raises `AatcError` naming the process that already does."""
        with locked(self.root, wait=False):
            for folder in (self.root, self.root / "plans", self.root / "transforms"):
                sweep(folder)
            yield


def _visible(folder: Path) -> list[Path]:
    """What lies in ``folder``, in name order, without the temporary directories of a writer at work."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []


def open_stats(path: Path) -> Artifact:
    """Open finished Stats; raises `ArtifactError` when absent, damaged, or the checkpoint of an unfinished collect."""
    artifact = open_artifact(path, "stats")
    results, settings = artifact.manifest.results, artifact.manifest.settings
    for what, done, wanted in (("windows", "windows", "samples"), ("gradient windows", "fisher_windows", "fisher")):
        if results.get(done) != settings.get(wanted):
            problem = f"{path} is a checkpoint of collect after {results.get(done)} of {settings.get(wanted)} {what}"
            raise ArtifactError(problem, "run the same aatc collect to finish it")
    check_stats(artifact)
    return artifact


def load_layer_stats(artifact: Artifact, layer: int) -> LayerStats:
    """The accumulated sums of one layer of a Stats; raises `ArtifactError` on shapes or values they cannot have."""
    geometry = artifact.manifest.model.geometry
    channels, heads, dim = geometry.channels, geometry.kv_heads, geometry.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "k_outer": (channels, channels),
        "v_outer": (channels, channels),
        "k_sum": (channels,),
        "v_sum": (channels,),
        "q_outer": (heads, dim, dim),
        "o_gram": (heads, dim, dim),
        "k_rows": (-1, channels),
        "v_rows": (-1, channels),
        "k_fisher": (channels, channels),
        "v_fisher": (channels, channels),
        "received": (BINS,),
        "k_probes": (BINS, channels, PROBES),
        "v_probes": (BINS, channels, PROBES),
    }
    parts = {}
    for part in LayerStats.TENSORS:
        name = f"layers.{layer}.{part}"
        absent = part in LayerStats.OPTIONAL and name not in artifact.manifest.tensors
        zeros = torch.zeros(shapes[part], dtype=torch.float64) if absent else None
        parts[part] = checked_tensor(artifact, name, shapes[part]) if zeros is None else zeros
    for part in ("k_outer", "v_outer", "q_outer", "o_gram", "k_fisher", "v_fisher"):
        if bool((parts[part].diagonal(dim1=-2, dim2=-1) < 0).any()):
            raise damaged(artifact.path, "stats", f"tensor 'layers.{layer}.{part}' has a negative sum of squares")
    count = artifact.manifest.results.get("tokens")
    if type(count) is not int or count < 1:
        raise damaged(artifact.path, "stats", "it has no token count")
    return LayerStats(count=count, filled=int(parts["k_rows"].shape[0]), readers=_readers(artifact), **parts)


def _readers(artifact: Artifact) -> int:
    """Positions of the gradient windows that read packed tokens, whose sampled tokens the gradients are of."""
    settings, windows = artifact.manifest.settings, artifact.manifest.results.get("fisher_windows")
    try:
        window = Window.model_validate(settings["window"])
        return max(int(settings["length"]) - window.sinks - window.recent, 0) * int(windows or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(artifact.path, "stats", "its settings are not those of Stats") from error


def checked_tensor(artifact: Artifact, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of finite floats with ``shape`` (-1: any length); raises `ArtifactError` when it is something else."""
    tensor = artifact.tensor(name)
    fits = tensor.dim() == len(shape) and all(want in (-1, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        problem = f"tensor {name!r} does not hold finite numbers of shape {list(shape)}"
        raise damaged(artifact.path, artifact.manifest.kind, problem)
    return tensor


def write_site(
    writer: ArtifactWriter, layer: int, side: Side, codec: TransformCodec, weight: Tensor, fisher: Tensor
) -> None:
    """Add one site of a Transform: matrices and scales in float32, variances and weights in float64."""
    name = f"layers.{layer}.{side}"
    writer.add(f"{name}.encode", codec.encode.to(torch.float32))
    writer.add(f"{name}.decode", codec.decode.to(torch.float32))
    writer.add(f"{name}.scale", codec.scale.to(torch.float32))
    writer.add(f"{name}.variance", codec.variance.to(torch.float64))
    writer.add(f"{name}.weight", weight.to(torch.float64))
    writer.add(f"{name}.fisher", fisher.to(torch.float64))


def load_energies(transform: Artifact) -> Energies:
    """Latent variances and weights of every site, for allocation; raises `ArtifactError` on negative ones."""
    energies: Energies = []
    geometry = transform.manifest.model.geometry
    for layer in range(geometry.layers):
        sites: dict[Side, SiteEnergy] = {}
        for side in SIDES:
            parts = {}
            for part in ("variance", "weight", "fisher"):
                name = f"layers.{layer}.{side}.{part}"
                parts[part] = checked_tensor(transform, name, (geometry.channels,)).numpy().astype(np.float64)
                if parts[part].min() < 0:
                    raise damaged(transform.path, "transform", f"tensor {name!r} has negative values")
            sites[side] = SiteEnergy(**parts)
        energies.append(sites)
    return energies


@dataclass(frozen=True)
class Plan:
    """A Plan as the run time reads it: its recipe, budget, widths and the Transform it belongs to.

    bits[layer][side] holds the widths [C]; with token classes the n C widths of class 0, 1, ... n - 1 in turn.
    starts: of recipes that code blocks of one precision, 1 where a block begins, else 0.
    """

    artifact: Artifact
    recipe: Recipe
    budget: Budget
    bits: list[Mapping[Side, list[int]]]
    groups: HeadGroups
    starts: list[Mapping[Side, list[int]]] | None = None
    classes: PlanClasses | None = None

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
        if self.classes is not None:
            widths = [self.class_bits(k) for k in range(self.classes.count)]
            return TokenLayout.of_classes(self.recipe, self.geometry, self.groups, widths, self.classes.shares.tolist())
        blocks = sum(sum(layer[side]) for layer in self.starts or () for side in SIDES)
        return CacheLayout.of_recipe(self.recipe, self.geometry, self.groups, self.bits, blocks)

    @property
    def mean_bits(self) -> float:
        """Mean code bits per channel over keys and values."""
        layout = self.layout
        if isinstance(layout, TokenLayout):
            return layout.mean_bits
        widths = [width for layer in self.bits for side in SIDES for width in layer[side]]
        return sum(widths) / len(widths)

    def class_bits(self, k: int) -> list[Mapping[Side, list[int]]]:
        """Widths [C] of class ``k`` of tokens by layer and side; of a plan without classes, those of class 0."""
        span = slice(k * self.geometry.channels, (k + 1) * self.geometry.channels)
        return [{side: layer[side][span] for side in SIDES} for layer in self.bits]


def open_plan(path: Path) -> Plan:
    """Read a Plan; raises `ArtifactError` when it is absent or damaged."""
    artifact = open_artifact(path, "plan")
    check_plan(artifact)
    try:
        settings = artifact.manifest.settings
        recipe, budget = Recipe.model_validate(settings["recipe"]), Budget.model_validate(settings["budget"])
        groups = head_groups_of(artifact, artifact.manifest.results["head_groups"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, "plan", "its settings are not those of a plan") from error
    geometry = artifact.manifest.model.geometry
    bits: list[Mapping[Side, list[int]]] = []
    classes = read_classes(artifact, recipe)
    shape = (geometry.channels,) if classes is None else (classes.count, geometry.channels)
    for layer in range(geometry.layers):
        widths = {side: artifact.tensor(f"layers.{layer}.{side}.bits") for side in SIDES}
        for side, tensor in widths.items():
            fits = tensor.dtype == torch.uint8 and tuple(tensor.shape) == shape
            if not fits or not set(tensor.flatten().tolist()) <= set(recipe.allowed_widths):
                raise damaged(path, "plan", f"the widths of layer {layer} {side} are out of range")
        bits.append({side: tensor.flatten().tolist() for side, tensor in widths.items()})
    starts = _starts(artifact, bits) if recipe.quantizer == "block-max" else None
    return Plan(artifact, recipe, budget, bits, groups, starts, classes)


def _starts(artifact: Artifact, bits: list[Mapping[Side, list[int]]]) -> list[Mapping[Side, list[int]]]:
    """Where blocks begin, in a plan of a recipe that has them."""
    found: list[Mapping[Side, list[int]]] = []
    for layer, widths in enumerate(bits):
        begins: dict[Side, list[int]] = {}
        for side in SIDES:
            values = artifact.tensor(f"layers.{layer}.{side}.starts")
            if values.dtype != torch.uint8 or values.shape != (len(widths[side]),) or int(values.max()) > 1:
                raise damaged(artifact.path, "plan", f"the blocks of layer {layer} {side} are out of range")
            begins[side] = values.tolist()
        found.append(begins)
    return found


def head_groups_of(artifact: Artifact, recorded: object) -> HeadGroups:
    """Head groups as a Transform's settings or a Plan's results record them; raises `ArtifactError`."""
    kind, heads = artifact.manifest.kind, artifact.manifest.model.geometry.kv_heads
    try:
        groups = HeadGroups.model_validate(recorded)
    except ValidationError as error:
        raise damaged(artifact.path, kind, f"{recorded!r} are not head groups of keys and values") from error
    if not groups.divide(heads):
        raise damaged(artifact.path, kind, f"{groups.described} do not divide {heads} kv heads")
    return groups


def transform_of(plan: Plan, path: Path | None = None) -> Artifact:
    """The Transform a plan was made from, beside it in the run or at ``path``; raises `ArtifactError`."""
    place = path or Run(plan.artifact.path.parent.parent).transform(plan.recipe.transform_name)
    transform = open_artifact(place, "transform")
    if transform.manifest.digest != plan.artifact.manifest.inputs.get("transform"):
        raise ArtifactError(
            f"{plan.artifact.path} was not made from the transform at {place}",
            "run aatc allocate --force to plan for this transform, or give the right one with --transform",
        )
    if head_groups_of(transform, transform.manifest.settings.get("head_groups")) != plan.groups:
        raise damaged(plan.artifact.path, "plan", f"its {plan.groups.described} are not those of its transform")
    return transform


def load_codecs(plan: Plan, transform: Artifact, device: str) -> list[dict[Side, TransformCodec]]:
    """One float32 codec per layer and side on ``device``.

    Raises `ArtifactError` on values no codec can have, `AatcError` for a method that has no packed form.
    """
    quantizer = plan.recipe.quantizer
    if quantizer not in PACKED_QUANTIZERS:
        raise AatcError(
            f"recipe {plan.recipe.name} has no packed cache: its quantizer {quantizer} is simulated only",
            "evaluate it with aatc eval kl, perplexity or a benchmark; its size is in aatc inspect",
        )
    if plan.classes is not None:
        raise AatcError(
            f"{plan.name} keeps tokens at {plan.classes.count} rates, which the packed cache does not hold yet",
            "evaluate it with aatc eval kl or perplexity, or plan with --recipe loss-aware",
        )
    if not plan.recipe.window.exact:
        raise AatcError(
            f"{plan.name} keeps its window in 8 bits, which the packed cache does not yet",
            "evaluate it with aatc eval kl or perplexity, or plan with a window of 16 bits",
        )
    return _codecs_at(plan, transform, device, plan.bits)


def load_simulated_codecs(plan: Plan, transform: Artifact, device: str) -> list[dict[Side, TransformCodec]]:
    """As `load_codecs`, for evaluators of text, which also read plans that the packed cache does not hold yet."""
    return _codecs_at(plan, transform, device, plan.bits)


def load_rated_codecs(plan: Plan, transform: Artifact, device: str) -> list[dict[Side, RatedCodec]]:
    """The codecs of a plan with token classes, one per layer and side; raises `ArtifactError` as `load_codecs`."""
    assert plan.classes is not None
    # one transform serves all classes: only widths differ
    first = _codecs_at(plan, transform, device, plan.class_bits(0))
    of_classes = [
        [
            {side: codecs[side].with_bits(torch.tensor(widths[side]).to(device)) for side in SIDES}
            for codecs, widths in zip(first, plan.class_bits(k), strict=True)
        ]
        for k in range(plan.classes.count)
    ]
    return rated_codecs(plan.classes, of_classes, device)


def _codecs_at(
    plan: Plan, transform: Artifact, device: str, bits: Sequence[Mapping[Side, list[int]]]
) -> list[dict[Side, TransformCodec]]:
    """One codec per layer and side at these widths [C]."""
    quantizer: Any = plan.recipe.quantizer
    codecs: list[dict[Side, TransformCodec]] = []
    channels = plan.geometry.channels
    for layer, widths in enumerate(bits):
        sites: dict[Side, TransformCodec] = {}
        for side in SIDES:
            groups = plan.groups.of(side)
            matrix: tuple[int, ...] = (groups, channels // groups, channels // groups)
            parts = {
                part: checked_tensor(
                    transform, f"layers.{layer}.{side}.{part}", matrix if "code" in part else (channels,)
                )
                for part in _SITE_TENSORS
            }
            if bool((parts["scale"] <= 0).any()):
                raise damaged(transform.path, "transform", f"layer {layer} {side} has a scale that is not positive")
            chosen = plan.recipe.key_weight if side == "k" else plan.recipe.value_weight
            codec = TransformCodec(
                parts["encode"],
                parts["decode"],
                parts["scale"],
                torch.tensor(widths[side]),
                parts["variance"],
                quantizer=quantizer,
                weight={"none": None, "fisher": parts["fisher"]}.get(chosen, parts["weight"]),
                scale_bits=plan.recipe.scale_bits,
            )
            sites[side] = codec.to(device)
        codecs.append(sites)
    return codecs
