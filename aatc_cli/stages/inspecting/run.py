"""inspect of a run directory: what is in it, how good its plans are, what is out of date and what is unfinished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.evaluation import AGAIN, read_sealed
from aatc_cli.artifacts.manifest import MANIFEST, Manifest, digest_of, read_manifest
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.errors import ArtifactError
from aatc_cli.stages.inspecting.facts import Inspection, Table


@dataclass(frozen=True)
class RunFacts:
    """What lies in a run, read once: manifests by place, plans, and the data of evaluation files."""

    run: Run
    manifests: dict[Path, Manifest]
    plans: list[Plan]
    evaluations: dict[Path, dict[str, Any]]
    unfinished: list[Stats]

    @classmethod
    def read(cls, run: Run) -> RunFacts:
        """Everything in ``run``; raises `ArtifactError` for what is damaged, and where there is nothing at all."""
        places = run.all_stats() + run.transforms() + run.plans()
        manifests = {place: read_manifest(place) for place in places if (place / MANIFEST).is_file()}
        files = sorted(run.evals.glob("*.json")) if run.evals.is_dir() else []
        partial = sorted(run.root.glob(".*.partial")) if run.root.is_dir() else []
        unfinished = [Stats.open(place, unfinished=True) for place in partial if (place / MANIFEST).is_file()]
        if not manifests and not files and not unfinished:
            remedy = "run aatc collect first, or name the run by --run"
            raise ArtifactError(f"there are no artifacts in {run.root}", remedy)
        plans = [Plan.open(place) for place, manifest in manifests.items() if manifest.kind == "plan"]
        evaluations = {path: read_evaluation_data(path) for path in files}
        return cls(run, manifests, plans, evaluations, unfinished)

    def stale(self, place: Path) -> str | None:
        """Why an artifact is not what its stage would make of the run now, or None: its inputs have changed since.

        Of inputs of which the run holds none, as in an exported plan, nothing can be said.
        """
        manifest = self.manifests[place]
        kinds = {each.kind for each in self.manifests.values()}
        digests = {each.digest: path for path, each in self.manifests.items()}
        for name, digest in manifest.inputs.items():
            noun = "transform" if name == "transform" else "stats"
            if noun not in kinds:
                continue
            if digest not in digests:
                return f"{noun} changed"
            beneath = self.stale(digests[digest])
            if beneath:
                return beneath
        return None

    def divergence(self, digest: str) -> dict[str, tuple[float, float | None]]:
        """KL and its standard error of one plan by text, each by the protocol of `protocols`."""
        found = {
            data["text"]: (data["kl_mean"], data.get("kl_stderr"))
            for data in self._kl()
            if data.get("plan") == digest and protocol_of(data) == self.protocols[data["text"]]
        }
        return dict(sorted(found.items()))

    @cached_property
    def protocols(self) -> dict[str, str]:
        """For every text the one protocol whose figures are shown together: plans are compared by no other.

        It is the one that most of the run's plans were measured by, of several the one that scored most tokens.
        """
        plans, counts = {plan.digest for plan in self.plans}, dict[str, dict[str, list[int]]]()
        for data in self._kl():
            tally = counts.setdefault(data["text"], {}).setdefault(protocol_of(data), [0, 0])
            tally[0] += data.get("plan") in plans
            tally[1] = max(tally[1], data["tokens_scored"])
        return {text: max(tallies, key=lambda one: (*tallies[one], one)) for text, tallies in counts.items()}

    def _kl(self) -> Iterator[dict[str, Any]]:
        for data in self.evaluations.values():
            if data.get("task") == "kl" and data.get("kl_mean") is not None:
                yield data


def protocol_of(data: Mapping[str, Any]) -> str:
    """What two results must have in common to be compared: their protocol, or before version 3 what stood for it."""
    told = ("model_fingerprint", "text_sha256", "windows", "length", "first_position", "dtype")
    return digest_of(data.get("protocol") or {name: data.get(name) for name in told})


def read_evaluation_data(path: Path) -> dict[str, Any]:
    """The data of an evaluation file of any task, checked against its digest; raises `ArtifactError`."""
    try:
        data = read_sealed(path, AGAIN)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", AGAIN) from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} is not an evaluation", AGAIN)
    return data


def inspect_run(run: Run, context: int = 8192) -> Inspection:
    """Artifacts in pipeline order, plans with their bytes at ``context`` tokens and their KL, evaluations, leftovers.

    Raises `ArtifactError` where there is nothing, or something damaged.
    """
    facts = RunFacts.read(run)
    artifacts = [_artifact(facts, place) for place in facts.manifests]
    plans = [plan_facts(facts, plan, context) for plan in facts.plans]
    evaluations = [_evaluation(facts, path, data) for path, data in facts.evaluations.items()]
    unfinished = [
        {
            "path": str(stats.path.relative_to(run.root)),
            "windows": stats.windows,
            "of": stats.settings.windows,
            "gradient_windows": stats.fisher_windows,
            "of_gradient_windows": stats.settings.gradients,
        }
        for stats in facts.unfinished
    ]
    data = {
        "run": str(run.root),
        "artifacts": artifacts,
        "plans": plans,
        "evaluations": evaluations,
        "unfinished": unfinished,
    }
    return Inspection(data, _tables(run, data, context))


def _artifact(facts: RunFacts, place: Path) -> dict[str, Any]:
    manifest = facts.manifests[place]
    return {
        "path": str(place.relative_to(facts.run.root)),
        "kind": manifest.kind,
        "model": manifest.model.name,
        "digest": manifest.digest,
        "made": made(place / MANIFEST),
        "stale": facts.stale(place),
    }


def plan_facts(facts: RunFacts, plan: Plan, context: int) -> dict[str, Any]:
    """One plan as the run knows it: size, quality and whether it is up to date. ``plan`` is its digest."""
    layout = plan.layout
    divergence = facts.divergence(plan.digest)
    return {
        "plan": plan.digest,
        "path": str(plan.path),
        "recipe": plan.recipe.name,
        "budget": plan.budget.label,
        "bits": plan.mean_bits,
        "bits_packed": layout.bits_packed,
        "context": context,
        "bytes_total": layout.bytes(context),
        "ratio": layout.ratio(context),
        "kl": {text: {"mean": mean, "stderr": stderr} for text, (mean, stderr) in divergence.items()},
        "kl_worst": max((mean for mean, _ in divergence.values()), default=None),
        "made": made(plan.path / MANIFEST),
        "stale": facts.stale(plan.path),
    }


def _evaluation(facts: RunFacts, path: Path, data: dict[str, Any]) -> dict[str, Any]:
    known = {plan.digest for plan in facts.plans}
    plan = data.get("plan")
    return {
        "path": str(path.relative_to(facts.run.root)),
        "task": data.get("task"),
        "recipe": data.get("recipe"),
        "budget": data.get("budget"),
        "plan": plan,
        "text": data.get("text"),
        "made": made(path),
        "stale": "plan changed" if plan is not None and plan not in known else None,
    }


def made(path: Path) -> str:
    """When a file was written, in ISO 8601 and UTC, to the second."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _tables(run: Run, data: dict[str, Any], context: int) -> list[Table]:
    tables = []
    others = [entry for entry in data["artifacts"] if entry["kind"] != "plan"]
    if others:
        rows = [[e["path"], e["model"], _day(e["made"]), e["digest"][:12], e["stale"] or ""] for e in others]
        tables.append(_filled(f"run {run.root}", ["artifact", "model", "made (UTC)", "digest", "stale"], rows))
    if data["plans"]:
        columns = ["plan", "packed bits", "MB", "ratio", "KL (nats)", "made (UTC)", "digest", "stale"]
        tables.append(_filled(f"plans, at {context:,} tokens", columns, [_plan_row(e) for e in data["plans"]]))
    if data["evaluations"]:
        tables.append(_evaluation_table(data["evaluations"]))
    if data["unfinished"]:
        rows = [[e["path"], f"{e['windows']} of {e['of']}"] for e in data["unfinished"]]
        title = "unfinished: the same aatc collect goes on from here"
        tables.append(Table(title, ["checkpoint", "windows"], rows))
    return tables


def _plan_row(entry: dict[str, Any]) -> list[str]:
    name = f"{entry['recipe']}-{entry['budget']}"
    worst = entry["kl_worst"]
    return [
        name,
        f"{entry['bits_packed']:.3f}",
        f"{entry['bytes_total'] / 1e6:,.4g}",
        f"{entry['ratio']:.2f}",
        "" if worst is None else f"{worst:.3g}",
        _day(entry["made"]),
        entry["plan"][:12],
        entry["stale"] or "",
    ]


def _evaluation_table(entries: list[dict[str, Any]]) -> Table:
    """One row per task and text: how many plans, and how many of those files are of plans that are gone."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        groups[str(entry["task"]), str(entry["text"] or "")].append(entry)
    rows = [
        [task, text, str(len(found)), str(sum(e["stale"] is not None for e in found) or "")]
        for (task, text), found in sorted(groups.items())
    ]
    return _filled("evaluations", ["task", "text", "files", "of plans that changed"], rows)


def _filled(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A table without the columns that nothing filled."""
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return Table(title, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _day(moment: str) -> str:
    return moment[:16]
