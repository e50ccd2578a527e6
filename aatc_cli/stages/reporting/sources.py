"""What the artifacts of a run were made from: the one model of all, and the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.manifest import MANIFEST, ModelIdentity, read_manifest, require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.report.data.run import TextUse


@dataclass(frozen=True)
class Source:
    """One Stats or Transform of the run: its model, and the texts it was made from."""

    model: ModelIdentity
    use: TextUse


def sources_of(run: Run) -> list[Source]:
    """Every Stats and Transform of the run, in name order; tokens used are those that Stats counted."""
    found: list[Source] = []
    used: dict[str, int] = {}
    for path in [*run.all_stats(), *run.transforms()]:
        if not (path / MANIFEST).is_file():
            continue
        manifest = read_manifest(path)
        if manifest.kind != "plan":
            what = path.name if manifest.kind == "stats" else f"transform {path.name}"
            if manifest.kind == "stats":
                used[manifest.digest] = Stats.open(path, unfinished=True).tokens
            counted = [used[d] for d in (manifest.digest, *manifest.inputs.values()) if d in used]
            use = TextUse(what, tuple(manifest.texts), counted[0] if len(set(counted)) == 1 else None)
            found.append(Source(manifest.model, use))
    return found


def common_model(plans: Sequence[Plan], sources: Sequence[Source]) -> ModelIdentity | None:
    """The one model all artifacts belong to; raises `ArtifactError` when there are two."""
    named = [(plan.name, plan.model) for plan in plans]
    named += [(source.use.artifact, source.model) for source in sources]
    for what, model in named[1:]:
        require_model(model, named[0][1], what)
    return named[0][1] if named else None
