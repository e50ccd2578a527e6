"""Plan: the width of every channel of every site, what it costs in bytes and what it is predicted to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, Noun, open_artifact, unchanged
from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.plan_classes import ClassFacts, PlanClasses, recorded_classes
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform, head_groups_of
from aatc_cli.config import Budget, HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import ArtifactError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.methods.sites import Library, Sites
from aatc_cli.profiles import dump, explain

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Allocation

# tokens of the byte law in the results of a plan whose budget names none: those at which the paper counts
_CONTEXT = 8192


class _Results(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    bits_mean: float = Field(ge=0)
    bits_budget: float = Field(gt=0)
    predicted: dict[Side, float] = Field(min_length=2)
    water_level: dict[Side, float] = Field(min_length=2)
    layout: dict[str, object]
    classes: tuple[ClassFacts, ...] = Field((), strict=False)
    keep: float = Field(1.0, gt=0)


@dataclass(frozen=True)
class Plan(Noun):
    """An opened Plan: its recipe, budget and widths, for the Transform it was made from.

    bits[layer][side] holds the widths [C]; with token classes the n C widths of class 0, 1, ... n - 1 in turn.
    predicted, water_level: distortion by side, and the level of its water-filling. bits_budget: bits per channel that
    the budget came to. starts: of recipes that code blocks of one precision, 1 where a block begins, else 0. keep: of
    a recipe with a press, the share of the tokens that stay, or above 1 their number.
    """

    recipe: Recipe
    budget: Budget
    bits: list[Mapping[Side, list[int]]]
    groups: HeadGroups
    classes: PlanClasses
    predicted: Mapping[Side, float]
    water_level: Mapping[Side, float]
    bits_budget: float
    class_facts: tuple[ClassFacts, ...] = ()
    starts: list[Mapping[Side, list[int]]] | None = None
    keep: float = 1.0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the Plan at ``path``; raises `ArtifactError` when it is absent or damaged."""
        artifact = open_artifact(path, "plan")
        try:
            results = _Results.model_validate(artifact.manifest.results)
        except ValidationError as error:
            raise artifact.damaged(f"its results are not those of a plan: {explain(error)}") from error
        try:
            settings = artifact.manifest.settings
            recipe, budget = Recipe.model_validate(settings["recipe"]), Budget.model_validate(settings["budget"])
            groups = head_groups_of(artifact, artifact.manifest.results["head_groups"])
        except (KeyError, TypeError, ValueError) as error:
            raise artifact.damaged("its settings are not those of a plan") from error
        classes = PlanClasses.of(recipe)
        bits = _widths(artifact, recipe, classes)
        return cls(
            artifact,
            recipe,
            budget,
            bits,
            groups,
            classes,
            results.predicted,
            results.water_level,
            results.bits_budget,
            results.classes,
            _starts(artifact, bits) if recipe.choices.quantizer.blocks else None,
            results.keep,
        )

    @property
    def name(self) -> str:
        """Recipe and budget: ``paper-2``."""
        return f"{self.recipe.name}-{self.budget.label}"

    @property
    def served_as(self) -> str:
        """Name by which a server says that it serves with this very plan: ``paper-2@1f2e3d4c5b6a``."""
        return f"{self.name}@{self.digest[:12]}"

    @property
    def layout(self) -> CacheLayout:
        """The byte law at this plan's widths."""
        blocks = sum(sum(layer[side]) for layer in self.starts or () for side in SIDES)
        widths = [self.class_bits(k) for k in range(self.classes.count)]
        return self.recipe.choices.layout(self.geometry, self.groups, widths, blocks, self.keep)

    @property
    def mean_bits(self) -> float:
        """Mean code bits per channel over keys and values."""
        return self.layout.mean_bits

    @property
    def bits_of_width(self) -> list[float]:
        """Bits of a code of width 0, 1, ... 16: the width, or what codes without a fixed size are expected to take."""
        expected = self.recipe.choices.quantizer.expected_bits()
        return [float(bits) for bits in (expected or range(17))]

    def class_bits(self, k: int) -> list[Mapping[Side, list[int]]]:
        """Widths [C] of class ``k`` of tokens by layer and side."""
        span = slice(k * self.geometry.channels, (k + 1) * self.geometry.channels)
        return [{side: layer[side][span] for side in SIDES} for layer in self.bits]

    def transform(self, path: Path | None = None) -> Transform:
        """The Transform it was made from, beside it in the run or at ``path``; raises `ArtifactError`."""
        place = path or Run(self.path.parent.parent).transform(self.recipe.transform_name)
        transform = Transform.open(place)
        if not self.made_from(transform):
            raise ArtifactError(
                f"{self.path} was not made from the transform at {place}",
                "run aatc allocate --force to plan for this transform, or give the right one with --transform",
            )
        if transform.head_groups != self.groups:
            raise self.artifact.damaged(f"its {self.groups.described} are not those of its transform")
        return transform

    def made_from(self, transform: Transform) -> bool:
        """Whether ``transform`` is the one it was made from."""
        return self.manifest.inputs.get("transform") == transform.digest

    def codecs(self, device: str, transform: Transform | None = None) -> list[dict[Side, Any]]:
        """One float32 codec per layer and side on ``device``, as the packed cache reads them.

        Raises `ArtifactError` on values no codec can have, `AatcError` for a method that has no packed form.
        """
        from aatc_cli.artifacts.codecs import require_packed

        require_packed(self.name, self.recipe)
        return self.simulated_codecs(device, transform)

    def simulated_codecs(
        self, device: str, transform: Transform | None = None, library: Library | None = None
    ) -> list[dict[Side, Any]]:
        """One codec per layer and side of any method, for evaluators; ``library`` makes those of other packages."""
        from aatc_cli.artifacts.codecs import codecs_of

        artifact = (transform or self.transform()).artifact
        widths = [self.class_bits(k) for k in range(self.classes.count)]
        sites = Sites(artifact, self.geometry, self.groups, widths[0], self.starts, library)
        return codecs_of(self.recipe, sites, widths, device)

    @staticmethod
    def wanted(transform: Transform, recipe: Recipe, budget: Budget) -> dict[str, Any]:
        """What the manifest of a Plan of these would hold, for `unchanged`."""
        return {
            "settings": {"recipe": dump(recipe), "budget": dump(budget)},
            "inputs": {"transform": transform.digest},
            "model": transform.model.model_dump(mode="json"),
        }

    @classmethod
    def exists(cls, path: Path, transform: Transform, recipe: Recipe, budget: Budget, *, force: bool) -> bool:
        """Whether the Plan at ``path`` is that of these inputs; raises as `unchanged` does when it is another."""
        return unchanged(path, "plan", cls.wanted(transform, recipe, budget), force=force) is not None

    @classmethod
    def write(
        cls,
        path: Path,
        transform: Transform,
        recipe: Recipe,
        budget: Budget,
        allocation: Allocation,
        layout: CacheLayout,
        bits_budget: float,
    ) -> Manifest:
        """Write the Plan of an allocation and its byte law. bits_budget: bits per channel that the budget came to."""
        wanted = cls.wanted(transform, recipe, budget)
        with ArtifactWriter(path, "plan") as writer:
            for index, layer in enumerate(allocation.bits):
                for side in SIDES:
                    writer.add(f"layers.{index}.{side}.bits", layer[side].astype(np.uint8))
                    if allocation.starts is not None:
                        writer.add(f"layers.{index}.{side}.starts", allocation.starts[index][side].astype(np.uint8))
            classes = {} if allocation.classes is None else {"classes": recorded_classes(allocation.classes)}
            return writer.commit(
                settings=wanted["settings"],
                model=transform.model,
                inputs=wanted["inputs"],
                results={
                    "bits_mean": layout.mean_bits,
                    "bits_budget": bits_budget,
                    "head_groups": dump(layout.groups),
                    "predicted": {side: _short(allocation.predicted[side]) for side in SIDES},
                    "water_level": {side: _short(allocation.water_level[side]) for side in SIDES},
                    "layout": layout.recorded(budget.context or _CONTEXT),
                    **({"keep": layout.keep} if recipe.pressed else {}),
                    **classes,
                },
            )


def _widths(artifact: Artifact, recipe: Recipe, classes: PlanClasses) -> list[Mapping[Side, list[int]]]:
    geometry = artifact.manifest.model.geometry
    # tiles of one class have an axis of classes, codes without classes have none
    whole = (classes.count, geometry.channels)
    shapes = [whole] if classes.count > 1 else [whole, whole[1:]]
    found: list[Mapping[Side, list[int]]] = []
    for layer in range(geometry.layers):
        widths: dict[Side, list[int]] = {}
        for side in SIDES:
            array = artifact.array(f"layers.{layer}.{side}.bits")
            widths[side] = array.flatten().tolist()
            if (
                array.dtype != np.uint8
                or array.shape not in shapes
                or not set(widths[side]) <= set(recipe.allowed_widths)
            ):
                raise artifact.damaged(f"the widths of layer {layer} {side} are out of range")
        found.append(widths)
    return found


def _starts(artifact: Artifact, bits: list[Mapping[Side, list[int]]]) -> list[Mapping[Side, list[int]]]:
    """Where blocks begin, in a plan of a recipe that has them."""
    found: list[Mapping[Side, list[int]]] = []
    for layer, widths in enumerate(bits):
        begins: dict[Side, list[int]] = {}
        for side in SIDES:
            values = artifact.array(f"layers.{layer}.{side}.starts")
            if values.dtype != np.uint8 or values.shape != (len(widths[side]),) or int(values.max()) > 1:
                raise artifact.damaged(f"the blocks of layer {layer} {side} are out of range")
            begins[side] = values.tolist()
        found.append(begins)
    return found


def _short(value: float) -> float:
    # nine digits: the last one or two of a logarithm may differ between mathematics libraries, the digest must not
    return float(f"{value:.9g}")
