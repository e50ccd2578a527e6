"""inspect: what is in an artifact, a run or an evaluation; tables for people, JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from aatc_cli.artifacts.artifact import Noun
from aatc_cli.artifacts.manifest import MANIFEST, read_manifest
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import Budget
from aatc_cli.core import SIDES
from aatc_cli.errors import ArtifactError
from aatc_cli.stages.inspecting.facts import Inspection, Table
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.inspecting.run import inspect_run

# in place of zero in divisions and logarithms
_TINY = 1e-300


def inspect_path(path: Path, context: int) -> Inspection:
    """Inspect an artifact directory, a run directory or an evaluation file; raises `ArtifactError` otherwise."""
    if path.is_file() and path.suffix != ".json":
        problem = f"{path} is neither an artifact, nor a run, nor an evaluation file"
        raise ArtifactError(problem, "give a run, the folder of an artifact, or a file of RUN/evals")
    if path.is_file():
        return _inspect_result(path)
    if not (path / MANIFEST).is_file():
        return inspect_run(Run(path), context)
    kind = read_manifest(path).kind
    if kind == "plan":
        return inspect_plan(Plan.open(path), context)
    return _inspect_transform(path) if kind == "transform" else _inspect_stats(path)


def inspect_budget(run: Path, recipe: str, budget: Budget, context: int) -> Inspection:
    """Inspect the plan of a run at a budget."""
    return inspect_plan(Plan.open(Run(run).plan(recipe, budget)), context)


def _inspect_result(path: Path) -> Inspection:
    # results of evaluations are read with what made them; other views do without torch
    from aatc_cli.evals.reading import read_result, result_tables

    result = read_result(path)
    data = result.model_dump(mode="json")
    shown = [[key, _number(value)] for key, value in data.items() if value is not None and not isinstance(value, list)]
    fields = Table(f"evaluation {path.name}", ["field", "value"], shown)
    return Inspection(data, [*(Table(*rows) for rows in result_tables(result)), fields])


def _inspect_transform(path: Path) -> Inspection:
    transform = Transform.open(path)
    sites, rows = [], []
    for layer in range(transform.geometry.layers):
        for side in SIDES:
            variance = transform.site(layer, side, "variance", (transform.geometry.channels,))
            share = variance / max(variance.sum(), _TINY)
            rank = float(np.exp(-(share * np.log(np.maximum(share, _TINY))).sum())) if variance.any() else 0.0
            top = float(variance.max() / max(np.sort(variance)[(variance.size - 1) // 2], _TINY))
            sites.append({"layer": layer, "side": side, "effective_rank": rank, "top_over_median": top})
            rows.append([f"{layer} {side}", f"{rank:.1f}", f"{top:.3g}"])
    title = f"transform for {transform.model.name}, {transform.head_groups.described}"
    table = Table(title, ["site", "effective rank", "top / median"], rows)
    return _artifact_inspection(transform, {"sites": sites}, table)


def _inspect_stats(path: Path) -> Inspection:
    stats = Stats.open(path, unfinished=True)
    rows = [[text.name, f"{text.weight:g}", str(text.windows), f"{text.tokens:,}"] for text in stats.texts]
    title = f"stats of {stats.model.name}: {stats.tokens:,} tokens"
    if stats.value_rank is not None:
        title += f", effective rank of values {stats.value_rank:.1f} of {stats.geometry.channels}"
    table = Table(title, ["text", "weight", "windows", "tokens in source"], rows)
    return _artifact_inspection(stats, {"texts": [t.model_dump(mode="json") for t in stats.texts]}, table)


def _artifact_inspection(noun: Noun, extra: dict[str, Any], table: Table) -> Inspection:
    manifest = noun.manifest
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
