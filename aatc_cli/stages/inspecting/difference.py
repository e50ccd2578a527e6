"""inspect A B: in what two artifacts of one kind, or two evaluations, differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aatc_cli.artifacts.changes import changes
from aatc_cli.artifacts.manifest import MANIFEST, Manifest, read_manifest
from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES
from aatc_cli.errors import UsageError
from aatc_cli.stages.inspecting.facts import Inspection, Table
from aatc_cli.stages.inspecting.run import read_evaluation_data

# parts of a manifest that say what an artifact is; results of plans are shown by their widths and sizes
_PARTS = ("settings", "model", "texts", "inputs", "results")


def inspect_difference(first: Path, second: Path) -> Inspection:
    """Every field in which two artifacts differ, and of plans the widths; raises `UsageError` for two kinds."""
    if first.is_file() and second.is_file():
        data = [read_evaluation_data(path) for path in (first, second)]
        return _inspection("evaluation", first, second, [], list(changes(data[0], data[1])), {})
    manifests = [_manifest(path) for path in (first, second)]
    kinds = [manifest.kind for manifest in manifests]
    if kinds[0] != kinds[1]:
        problem = f"{first} holds {_article(kinds[0])} and {second} {_article(kinds[1])}"
        raise UsageError(problem, "compare two artifacts of one kind, or look at each alone")
    parts = [manifest.model_dump(mode="json", include=set(_PARTS)) for manifest in manifests]
    fields = list(changes(parts[0], parts[1]))
    digests = [manifest.digest for manifest in manifests]
    extra = _tensors(*manifests)
    if kinds[0] == "plan":
        extra |= _widths(Plan.open(first), Plan.open(second))
    return _inspection(kinds[0], first, second, digests, fields, extra)


def _manifest(path: Path) -> Manifest:
    if not (path / MANIFEST).is_file():
        raise UsageError(f"{path} is neither an artifact nor an evaluation file", "give two of aatc inspect's list")
    return read_manifest(path)


def _article(kind: str) -> str:
    return "stats" if kind == "stats" else f"a {kind}"


def _tensors(first: Manifest, second: Manifest) -> dict[str, Any]:
    names = sorted(set(first.tensors) | set(second.tensors))
    return {"tensors": [name for name in names if first.tensors.get(name) != second.tensors.get(name)]}


def _widths(first: Plan, second: Plan) -> dict[str, Any]:
    """Mean widths and channels whose width differs, by site; nothing where the plans have other shapes."""
    if first.geometry != second.geometry or first.classes.count != second.classes.count:
        return {}
    sites = []
    for layer, (old, new) in enumerate(zip(first.bits, second.bits, strict=True)):
        for side in SIDES:
            pairs = list(zip(old[side], new[side], strict=True))
            sites.append(
                {
                    "layer": layer,
                    "side": side,
                    "bits_mean": [sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)],
                    "channels": sum(a != b for a, b in pairs),
                    "largest": max(abs(a - b) for a, b in pairs),
                }
            )
    return {"sites": sites}


def _inspection(
    kind: str, first: Path, second: Path, digests: list[str], fields: list[tuple[str, Any, Any]], extra: dict[str, Any]
) -> Inspection:
    same = not fields and not extra.get("tensors")
    data = {
        "kind": kind,
        "paths": [str(first), str(second)],
        "digests": digests,
        "identical": same,
        "fields": [{"field": name, "first": old, "second": new} for name, old, new in fields],
    } | extra
    rows = [["digest", *(digest[:12] for digest in digests)]] if digests else []
    rows += [[name, _short(old), _short(new)] for name, old, new in fields]
    title = f"{first} and {second}: {'identical' if same else 'they differ'}"
    tables = [Table(title, ["field", "first", "second"], rows)]
    sites = [site for site in extra.get("sites", []) if site["channels"]]
    if sites:
        shown = [
            [
                f"{s['layer']} {s['side']}",
                *(f"{mean:.2f}" for mean in s["bits_mean"]),
                str(s["channels"]),
                str(s["largest"]),
            ]
            for s in sites
        ]
        columns = ["site", "mean bits: first", "second", "channels that differ", "by at most"]
        tables.append(Table("widths", columns, shown))
    elif extra.get("tensors"):
        tables.append(Table("tensors that differ", ["name"], [[name] for name in extra["tensors"]]))
    return Inspection(data, tables)


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 30 else f"{text[:14]}…{text[-15:]}"
