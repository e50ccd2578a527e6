"""What manifests claim beside their tensors, checked before any of it is used."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aatc_cli.artifacts.artifact import Artifact, damaged
from aatc_cli.profiles import explain
from aatc_cli.stages.collecting.settings import CollectSettings


class _Claims(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _StatsResults(_Claims):
    windows: int = Field(ge=0)
    tokens: int = Field(ge=1)
    fisher_windows: int = Field(ge=0)


class _PerSide(_Claims):
    k: float
    v: float


class _PlanResults(_Claims):
    bits_mean: float = Field(ge=0)
    bits_budget: float = Field(gt=0)
    predicted: _PerSide
    water_level: _PerSide
    layout: dict[str, object]


def check_stats(artifact: Artifact) -> None:
    """Raise `ArtifactError` unless settings and results are those of Stats and the token count follows from them."""
    manifest = artifact.manifest
    try:
        settings = CollectSettings.model_validate_json(json.dumps(manifest.settings))
        results = _StatsResults.model_validate(manifest.results)
    except ValidationError as error:
        raise damaged(artifact.path, "stats", f"its settings are not those of Stats: {explain(error)}") from error
    if results.tokens != results.windows * (settings.length - settings.skip_first):
        raise damaged(artifact.path, "stats", "its token count is not that of its windows")


def check_plan(artifact: Artifact) -> None:
    """Raise `ArtifactError` unless the results are those of a Plan."""
    try:
        _PlanResults.model_validate(artifact.manifest.results)
    except ValidationError as error:
        raise damaged(artifact.path, "plan", f"its results are not those of a plan: {explain(error)}") from error
