"""inspect: what is in an artifact and what a budget costs; tables for people, JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.artifact import MANIFEST, Artifact, open_artifact, read_manifest
from aatc_cli.artifacts.files import Plan, Run, head_groups_of, open_plan
from aatc_cli.config import Budget
from aatc_cli.core import SIDES
from aatc_cli.core.token_layout import TokenLayout
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.evals.reading import read_result, result_tables
from aatc_cli.profiles import HeadGroups, ModelProfile, Recipe
from aatc_cli.stages.allocate import allowed_bytes
from aatc_cli.stages.inspect_classes import COLUMNS as CLASS_COLUMNS
from aatc_cli.stages.inspect_classes import class_facts, class_rows
from aatc_cli.stages.preflight import ROWS, stats_bytes

# the first stands for no channel at all: a space would be trimmed and the columns would no longer line up
_BARS = "·▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Table:
    """A table for people: title, column names, rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Inspection:
    """The same facts twice: ``data`` for programs, ``tables`` for people."""

    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)


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


def inspect_run(run: Run) -> Inspection:
    """The artifacts in a run directory, in pipeline order."""
    places = run.all_stats() + run.transforms() + run.plans()
    found = [(place, read_manifest(place)) for place in places if (place / MANIFEST).is_file()]
    evals = sorted(run.evals.glob("*.json")) if run.evals.is_dir() else []
    if not found and not evals:
        raise ArtifactError(f"there are no artifacts in {run.root}", "run aatc collect first, or name the run by --run")
    rows = [[str(p.relative_to(run.root)), m.kind, m.model.name, m.digest[:12]] for p, m in found]
    data = {
        "run": str(run.root),
        "artifacts": [
            {"path": path, "kind": kind, "model": model, "digest": manifest.digest}
            for (path, kind, model, _), (_, manifest) in zip(rows, found, strict=True)
        ],
        "evaluations": [path.name for path in evals],
    }
    tables = [Table(f"run {run.root}", ["artifact", "kind", "model", "digest"], rows)]
    if evals:
        tables.append(Table("evaluations", ["file"], [[path.name] for path in evals]))
    return Inspection(data, tables)


def inspect_plan(plan: Plan, context: int) -> Inspection:
    """Widths of every site with their histogram, and where the bytes go at ``context`` tokens."""
    sites, rows = [], []
    for layer, widths in enumerate(plan.bits):
        for side in SIDES:
            counts = Counter(widths[side])
            mean = sum(widths[side]) / len(widths[side])
            sites.append({"layer": layer, "side": side, "bits_mean": mean, "histogram": dict(sorted(counts.items()))})
            dropped = counts.get(0, 0)
            rows.append([f"{layer} {side}", f"{mean:.2f}", str(dropped), str(max(counts)), _bars(counts)])
    layout = plan.layout.summary(context)
    manifest = plan.artifact.manifest
    data = {
        "kind": "plan",
        "digest": manifest.digest,
        "recipe": plan.recipe.name,
        "budget": plan.budget.label,
        "model": manifest.model.model_dump(mode="json"),
        "bits_mean": plan.mean_bits,
        "results": manifest.results,
        "inputs": manifest.inputs,
        "layout": layout,
        "sites": sites,
    }
    widths_table = Table(
        f"plan {plan.name} for {manifest.model.name}: {plan.mean_bits:.3f} bits per channel",
        ["site", "mean bits", "dropped", "widest", "channels at 0..16 bits"],
        rows,
    )
    if plan.classes is None:
        return Inspection(data, [widths_table, _layout_table(layout)])
    facts = class_facts(plan)
    table = Table("token classes, least attended first", CLASS_COLUMNS, class_rows(facts))
    return Inspection(data | {"classes": facts}, [widths_table, table, _layout_table(layout)])


def inspect_profile(profile: ModelProfile, recipe: Recipe, budget: Budget, context: int) -> Inspection:
    """The byte law for a profile at a budget and the memory of its statistics, with no model and no plan at hand."""
    bits = _nominal_bits(profile, recipe, budget)
    groups = _groups(profile, recipe)
    layout = TokenLayout.nominal_of_classes(recipe, profile.geometry, groups, bits).summary(context)
    geometry = profile.geometry
    held = stats_bytes(geometry)
    collect = {"rows": ROWS, "bytes_stats": held, "bytes_stats_layer": held // geometry.layers}
    data = {"profile": profile.name, "recipe": recipe.name, "bits": bits} | layout | {"collect": collect}
    facts = Table(
        f"profile {profile.name} ({profile.model})",
        ["fact", "value"],
        [
            ["layers", str(geometry.layers)],
            ["query heads / kv heads / head dim", f"{geometry.heads} / {geometry.kv_heads} / {geometry.head_dim}"],
            ["head groups", f"{profile.head_groups} ({profile.head_groups_why})"],
            [f"of {recipe.name}", groups.described],
            ["bits per channel", f"{bits:.4g}"],
            ["collect: statistics in memory", f"{held / 1e9:.2f} GB beside the model, with {ROWS:,} rows a layer"],
            ["whiten: statistics in memory", f"{collect['bytes_stats_layer'] / 1e6:.1f} MB, of a layer at a time"],
        ],
    )
    return Inspection(data, [facts, _layout_table(layout)])


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


def _groups(profile: ModelProfile, recipe: Recipe) -> HeadGroups:
    return recipe.head_groups(profile.geometry.kv_heads, HeadGroups.both(profile.head_groups))


def _nominal_bits(profile: ModelProfile, recipe: Recipe, budget: Budget) -> float:
    if budget.unit == "bits":
        return budget.value
    assert budget.context is not None
    groups = _groups(profile, recipe)
    if not recipe.packed:
        raise UsageError(
            f"what {recipe.name} comes to at a ratio or a size depends on the plan",
            "give --budget in bits, or plan and inspect the plan",
        )
    empty = TokenLayout.nominal_of_classes(recipe, profile.geometry, groups, 0.0)
    spare = allowed_bytes(budget, empty) - empty.bytes(budget.context)
    one = TokenLayout.nominal_of_classes(recipe, profile.geometry, groups, 1.0)
    return spare / (one.bytes(budget.context) - empty.bytes(budget.context))


def _layout_table(layout: dict[str, Any]) -> Table:
    total = layout["bytes_total"]
    rows = [[cause, f"{count:,}", f"{100 * count / total:.1f} %"] for cause, count in layout["breakdown"].items()]
    rows.append(["total", f"{total:,}", f"ratio {layout['ratio']:.2f}"])
    rows.append(["float16 cache", f"{layout['bytes_fp16']:,}", ""])
    rows += [[f"static: {cause}", f"{count:,}", ""] for cause, count in layout["breakdown_static"].items()]
    rows.append(["ratio with static", f"{layout['ratio_with_static']:.2f}", ""])
    title = f"bytes at {layout['context']:,} tokens, {layout['bits_effective']:.3f} effective bits"
    return Table(title, ["cause", "bytes", "share"], rows)


def _bars(counts: Counter[int]) -> str:
    peak = max(counts.values())
    return "".join(_BARS[-(-counts.get(bits, 0) * (len(_BARS) - 1) // peak)] for bits in range(17))


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
