"""inspect of a run directory: its artifacts in pipeline order."""

from __future__ import annotations

from aatc_cli.artifacts.manifest import MANIFEST, read_manifest
from aatc_cli.artifacts.run import Run
from aatc_cli.errors import ArtifactError
from aatc_cli.stages.inspecting.facts import Inspection, Table


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
