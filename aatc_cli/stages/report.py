"""`report`: a run's plans and evaluations as Markdown, one HTML page, CSV and JSON. Runs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aatc_cli import __version__
from aatc_cli.artifacts.disk import write_text
from aatc_cli.artifacts.evaluation import read_evaluations, read_measurement
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.manifest import MANIFEST, ModelIdentity, read_manifest, require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.study import read_studies
from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Floats
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import Result as NeedleResult
from aatc_cli.evals.speed.table import read_speed
from aatc_cli.evals.stability.result import read_stability
from aatc_cli.evals.study_scores import cell_evaluation
from aatc_cli.report.data.published import published_for
from aatc_cli.report.data.run import Absent, PlanView, ReportData, Spectrum, TextUse, paper_first
from aatc_cli.report.data.study import StudyView
from aatc_cli.report.document.build import build_document
from aatc_cli.report.document.plans import NO_PLANS
from aatc_cli.report.render.files import render_csv, render_json
from aatc_cli.report.render.markdown import render_markdown
from aatc_cli.report.render.page import render_figures, render_html


@dataclass(frozen=True)
class ReportFiles:
    """Where the four forms of a report were written, and the figures of studies."""

    markdown: Path
    html: Path
    csv: Path
    json: Path
    figures: tuple[Path, ...] = ()


def make_report(run: Run, *, title: str | None = None) -> ReportFiles:
    """Write ``report.md``, ``report.html``, ``results.csv``, ``report.json`` and the figures of studies.

    All of them lie in ``run.report``.

    Each file appears whole or not at all; the same artifacts and evaluations give the same bytes. Raises `AatcError`
    when the run holds neither plans nor evaluations, and `ArtifactError` when one of them is damaged or the plans
    belong to different models.
    """
    data = load_report(run, title=title)
    document = build_document(data)
    figures = {run.report / name: text for name, text in render_figures(document).items()}
    files = ReportFiles(
        run.report / "report.md",
        run.report / "report.html",
        run.report / "results.csv",
        run.report / "report.json",
        tuple(figures),
    )
    texts = {
        files.markdown: render_markdown(document),
        files.html: render_html(document),
        files.csv: render_csv(data.evaluations),
        files.json: render_json(data),
        **figures,
    }
    with locked(run.report, wait=True):
        sweep(run.report)
        for path, text in texts.items():
            write_text(path, text)
    return files


def load_report(run: Run, *, title: str | None = None) -> ReportData:
    """Read everything a report shows from ``run``; raises as `make_report` does."""
    evaluations = tuple(read_evaluations(run.evals)) if run.evals.is_dir() else ()
    stability, speed = tuple(read_stability(run.evals)), tuple(read_speed(run.evals))
    memory = tuple(read_measurement(path, MemoryResult) for path in sorted(run.evals.glob("memory.*.json")))
    answers = tuple(read_measurement(path, BenchmarkResult) for path in sorted(run.evals.glob("benchmark.*.json")))
    needles = tuple(read_measurement(path, NeedleResult) for path in sorted(run.evals.glob("needles.*.json")))
    plans = [Plan.open(path) for path in run.plans()]
    measured = (*evaluations, *stability, *speed, *memory, *answers, *needles)
    if not measured and not plans and not any(run.studies.glob("*.json")):
        raise AatcError(
            f"there is nothing to report in {run.root}: it holds no plans and no evaluations",
            "run aatc allocate and aatc eval first, or name the right directory with --run",
        )
    plans.sort(key=lambda plan: (paper_first(plan.recipe.name), -plan.mean_bits, plan.budget.label))
    sources = _sources(run)
    model = _common_model(plans, sources)
    name = model.name if model else ", ".join(sorted({e.model for e in measured}))
    return ReportData(
        title=title or f"Compressing the KV cache of {name}",
        version=__version__,
        model=model,
        texts=tuple(source.use for source in sources if source.use.texts),
        evaluations=evaluations,
        plans=tuple(_view(plan) for plan in plans),
        spectrum=_spectrum(run, plans),
        studies=tuple(_studies(run)),
        stability=stability,
        speed=speed,
        memory=memory,
        answers=answers,
        needles=needles,
    )


def _studies(run: Run) -> Iterator[StudyView]:
    """Every study of the run with the evaluations its cells name; files that are gone are left to the report to say."""
    for result in read_studies(run.root):
        found = {cell.file: e for cell in result.cells if cell.file and (e := cell_evaluation(run.root, cell))}
        yield StudyView(result, found, published_for(result.model))


@dataclass(frozen=True)
class _Source:
    """One Stats or Transform of the run: its model, and the texts it was made from."""

    model: ModelIdentity
    use: TextUse


def _sources(run: Run) -> list[_Source]:
    """Every Stats and Transform of the run, in name order; tokens used are those that Stats counted."""
    found: list[_Source] = []
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
            found.append(_Source(manifest.model, use))
    return found


def _common_model(plans: Sequence[Plan], sources: Sequence[_Source]) -> ModelIdentity | None:
    """The one model all artifacts belong to; raises `ArtifactError` when there are two."""
    named = [(plan.name, plan.model) for plan in plans]
    named += [(source.use.artifact, source.model) for source in sources]
    for what, model in named[1:]:
        require_model(model, named[0][1], what)
    return named[0][1] if named else None


def _view(plan: Plan) -> PlanView:
    return PlanView(
        recipe=plan.recipe.name,
        budget=plan.budget.label,
        digest=plan.digest,
        protected=plan.geometry.leading(plan.recipe.protect.layers),
        groups=plan.groups,
        bits=plan.bits,
        bits_mean=plan.mean_bits,
        predicted=dict(plan.predicted),
        water_level=dict(plan.water_level),
        layout=plan.layout,
    )


def _spectrum(run: Run, plans: Sequence[Plan]) -> Spectrum | Absent:
    """Energies of the first unprotected, the middle and the last layer under the paper's recipe, or the first one."""
    if not plans:
        return Absent(NO_PLANS)
    recipe = plans[0].recipe
    place = run.transform(recipe.transform_name)
    if not place.exists():
        return Absent(f"No transform {recipe.transform_name!r} in this run to take the spectrum from: aatc whiten")
    transform = Transform.open(place)
    chosen = [plan for plan in plans if plan.recipe == recipe]
    if not all(plan.made_from(transform) for plan in chosen):
        return Absent(f"The plans of {recipe.name} were not made from this run's transform: aatc allocate --force")
    energies = transform.energies()
    last = len(energies) - 1
    first = min(chosen[0].geometry.leading(recipe.protect.layers), last)
    layers = tuple(sorted({first, (first + last) // 2, last}))
    energy: dict[tuple[int, Side], Floats] = {
        (layer, side): recipe.choices.energy(energies[layer][side], side) for layer in layers for side in SIDES
    }
    views = [_view(plan) for plan in chosen]
    levels = tuple(
        (f"{view.budget} bits" if plan.budget.unit == "bits" else view.budget, view.water_level)
        for plan, view in zip(chosen, views, strict=True)
    )
    return Spectrum(recipe.name, layers, energy, levels)
