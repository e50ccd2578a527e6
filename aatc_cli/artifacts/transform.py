"""Transform: encode and decode matrices of every site with latent variances, weights and channel scales."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, Noun, open_artifact
from aatc_cli.artifacts.manifest import Manifest
from aatc_cli.artifacts.stats import Stats
from aatc_cli.config import HeadGroups, Settings
from aatc_cli.core import SIDES, Side
from aatc_cli.methods.choices import Choices, MethodTables
from aatc_cli.methods.prediction_fields import PredictedCoding
from aatc_cli.methods.registry import names, table_names
from aatc_cli.profiles import dump, explain

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.allocate import Energies
    from aatc_cli.core.codec import TransformCodec


class WhitenSettings(Settings):
    """What is computed from the Stats."""

    transform: str = "whiten"
    head_groups: HeadGroups = Field(HeadGroups.both(1), description="head groups per layer, each transformed jointly")
    percentile: float = Field(99.0, gt=0, le=100, description="percentile of |h| taken as channel scale")
    shrinkage: float = Field(0.1, ge=0, le=1, description="share of the loss metric replaced by its diagonal")
    tables: tuple[str, ...] = Field((), strict=False, description="quantizers whose tables it holds; none not written")

    prediction: PredictedCoding | None = Field(None, description="what maps are fitted for; none not written")

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        absent = [name for name in ("tables", "prediction") if not getattr(self, name)]
        return {key: part for key, part in data.items() if key not in absent}

    @model_validator(mode="after")
    def _known(self) -> Self:
        for value, known in [(self.transform, names("transform")), *((name, table_names()) for name in self.tables)]:
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return self


class _Results(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    tokens: int = Field(ge=1)
    fisher_windows: int = Field(ge=0)


@dataclass(frozen=True)
class WhitenedLayer:
    """What a Transform holds of one layer, on the CPU: the codec and two weights of each side, and tensors by name."""

    sites: dict[Side, tuple[TransformCodec, Tensor, Tensor]]
    tables: dict[str, Tensor]


@dataclass(frozen=True)
class Transform(Noun):
    """An opened Transform. tokens, fisher_windows: of the Stats that its variances and weights come from."""

    settings: WhitenSettings
    tokens: int
    fisher_windows: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the Transform at ``path``; raises `ArtifactError` when it is absent or damaged."""
        artifact = open_artifact(path, "transform")
        try:
            recorded = artifact.manifest.settings.get("head_groups")
            head_groups_of(artifact, recorded)
            settings = WhitenSettings.model_validate_json(json.dumps(artifact.manifest.settings))
            results = _Results.model_validate(artifact.manifest.results)
        except ValidationError as error:
            raise artifact.damaged(f"its settings are not those of a transform: {explain(error)}") from error
        return cls(artifact, settings, results.tokens, results.fisher_windows)

    @property
    def head_groups(self) -> HeadGroups:
        """Head groups of keys and of values, each transformed jointly."""
        return self.settings.head_groups

    def site(self, layer: int, side: Side, part: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A tensor of finite floats of one site; raises `ArtifactError` when it is absent or something else."""
        return self.artifact.floats(f"layers.{layer}.{side}.{part}", shape)

    def energies(self) -> Energies:
        """Latent variances and weights of every site, for allocation; raises `ArtifactError` on negative ones."""
        from aatc_cli.core.allocate import SiteEnergy

        energies: Energies = []
        for layer in range(self.geometry.layers):
            sites: dict[Side, SiteEnergy] = {}
            for side in SIDES:
                parts = {}
                for part in ("variance", "weight", "fisher"):
                    parts[part] = self.site(layer, side, part, (self.geometry.channels,)).astype(np.float64)
                    if parts[part].min() < 0:
                        raise self.artifact.damaged(f"tensor 'layers.{layer}.{side}.{part}' has negative values")
                sites[side] = SiteEnergy(**parts)
            energies.append(sites)
        for side in SIDES:
            if not any(bool(sites[side].variance.any()) for sites in energies):
                raise self.artifact.damaged(f"the variances of {side} are zero in every channel of every layer")
        return energies

    def tables(self, choices: Choices) -> MethodTables:
        """What a recipe of these choices reads beside energies; raises `ArtifactError` where it cannot be had."""
        return choices.read_tables(self.artifact, self.geometry)

    @staticmethod
    def wanted(settings: WhitenSettings, basis: Stats, rates: Stats) -> dict[str, Any]:
        """What the manifest of a Transform of these Stats would hold, for `unchanged`."""
        return {
            "settings": dump(settings),
            "inputs": {"transform_stats": basis.digest, "rate_stats": rates.digest},
            "model": rates.model.model_dump(mode="json"),
        }

    @classmethod
    def write(
        cls,
        path: Path,
        settings: WhitenSettings,
        basis: Stats,
        rates: Stats,
        layers: Iterable[WhitenedLayer],
        joint: Iterable[tuple[str, Tensor]],
        *,
        device: str,
    ) -> Manifest:
        """Write every layer as it comes, then the ``joint`` tensors over all layers; ``device`` is never hashed."""
        wanted = cls.wanted(settings, basis, rates)
        with ArtifactWriter(path, "transform") as writer:
            for layer, found in enumerate(layers):
                for side in SIDES:
                    write_site(writer, layer, side, *found.sites[side])
                for name, tensor in found.tables.items():
                    writer.add(f"layers.{layer}.{name}", tensor)
            for name, tensor in joint:
                writer.add(f"joint.{name}", tensor)
            return writer.commit(
                settings=wanted["settings"],
                model=rates.model,
                inputs=wanted["inputs"],
                texts=rates.texts,
                results={"tokens": rates.tokens, "fisher_windows": rates.fisher_windows},
                provenance={"device": device},
            )


def write_site(
    writer: ArtifactWriter, layer: int, side: Side, codec: TransformCodec, weight: Tensor, fisher: Tensor
) -> None:
    """Add one site of a Transform: matrices and scales in float32, variances and weights in float64."""
    name = f"layers.{layer}.{side}"
    writer.add(f"{name}.encode", codec.encode.float())
    writer.add(f"{name}.decode", codec.decode.float())
    writer.add(f"{name}.scale", codec.scale.float())
    writer.add(f"{name}.variance", codec.variance.double())
    writer.add(f"{name}.weight", weight.double())
    writer.add(f"{name}.fisher", fisher.double())


def head_groups_of(artifact: Artifact, recorded: object) -> HeadGroups:
    """Head groups as a Transform's settings or a Plan's results record them; raises `ArtifactError`."""
    heads = artifact.manifest.model.geometry.kv_heads
    try:
        groups = HeadGroups.model_validate(recorded)
    except ValidationError as error:
        raise artifact.damaged(f"{recorded!r} are not head groups of keys and values") from error
    if not groups.divide(heads):
        raise artifact.damaged(f"{groups.described} do not divide {heads} kv heads")
    return groups
