"""inspect: what is in an artifact, a run or an evaluation; tables for people, JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.artifact import MANIFEST, Artifact, open_artifact, read_manifest
from aatc_cli.artifacts.files import Run, head_groups_of, open_plan
from aatc_cli.core import SIDES
from aatc_cli.evals.reading import read_result, result_tables
from aatc_cli.stages.inspecting.facts import Inspection, Table
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.inspecting.run import inspect_run


def inspect_path(path: Path, context: int) -> Inspection:
    """Inspect an artifact directory, a run directory or an evaluation file; raises `ArtifactError` otherwise."""
    if path.is_file():
        return _inspect_result(path)
    if not (path / MANIFEST).is_file():
        return inspect_run(Run(path))
    kind = read_manifest(path).kind
    if kind == "plan":
        return inspect_plan(open_plan(path), context)
    return _inspect_transform(path) if kind == "transform" else _inspect_stats(path)


def _inspect_result(path: Path) -> Inspection:
    result = read_result(path)
    data = result.model_dump(mode="json")
    shown = [[key, _number(value)] for key, value in data.items() if value is not None and not isinstance(value, list)]
    fields = Table(f"evaluation {path.name}", ["field", "value"], shown)
    return Inspection(data, [*(Table(*rows) for rows in result_tables(result)), fields])


def _inspect_transform(path: Path) -> Inspection:
    artifact = open_artifact(path, "transform")
    sites, rows = [], []
    for layer in range(artifact.manifest.model.geometry.layers):
        for side in SIDES:
            variance = artifact.tensor(f"layers.{layer}.{side}.variance")
            share = variance / variance.sum().clamp_min(1e-300)
            rank = float(torch.exp(-(share * share.clamp_min(1e-300).log()).sum()))
            top = float(variance.max() / variance.median().clamp_min(1e-300))
            sites.append({"layer": layer, "side": side, "effective_rank": rank, "top_over_median": top})
            rows.append([f"{layer} {side}", f"{rank:.1f}", f"{top:.3g}"])
    groups = head_groups_of(artifact, artifact.manifest.settings.get("head_groups"))
    title = f"transform for {artifact.manifest.model.name}, {groups.described}"
    table = Table(title, ["site", "effective rank", "top / median"], rows)
    return _artifact_inspection(artifact, {"sites": sites}, table)


def _inspect_stats(path: Path) -> Inspection:
    artifact = open_artifact(path, "stats")
    manifest = artifact.manifest
    rows = [[text.name, f"{text.weight:g}", str(text.windows), f"{text.tokens:,}"] for text in manifest.texts]
    title = f"stats of {manifest.model.name}: {manifest.results['tokens']:,} tokens"
    table = Table(title, ["text", "weight", "windows", "tokens in source"], rows)
    return _artifact_inspection(artifact, {"texts": [t.model_dump(mode="json") for t in manifest.texts]}, table)


def _artifact_inspection(artifact: Artifact, extra: dict[str, Any], table: Table) -> Inspection:
    manifest = artifact.manifest
    data = {
        "kind": manifest.kind,
        "digest": manifest.digest,
        "model": manifest.model.model_dump(mode="json"),
        "settings": manifest.settings,
        "inputs": manifest.inputs,
        "results": manifest.results,
    }
    return Inspection(data | extra, [table])


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
