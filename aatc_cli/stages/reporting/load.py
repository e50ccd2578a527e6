"""Everything a report shows, read from a run."""

from __future__ import annotations

from collections.abc import Iterator

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import read_studies
from aatc_cli.errors import AatcError
from aatc_cli.evals.study_scores import cell_evaluation
from aatc_cli.report.data.published import published_for
from aatc_cli.report.data.run import ReportData, paper_first
from aatc_cli.report.data.study import StudyView
from aatc_cli.stages.reporting.measured import Measured
from aatc_cli.stages.reporting.sources import common_model, sources_of
from aatc_cli.stages.reporting.spectrum import plan_view, spectrum_of
from aatc_cli.version import __version__


def load_report(run: Run, *, title: str | None = None) -> ReportData:
    """Read everything a report shows from ``run``; raises as `stages.report.make_report` does."""
    measured = Measured.of(run)
    plans = [Plan.open(path) for path in run.plans()]
    if not measured.models and not plans and not any(run.studies.glob("*.json")):
        raise AatcError(
            f"there is nothing to report in {run.root}: it holds no plans and no evaluations",
            "run aatc allocate and aatc eval first, or name the right directory with --run",
        )
    plans.sort(key=lambda plan: (paper_first(plan.recipe.name), -plan.mean_bits, plan.budget.label))
    sources = sources_of(run)
    model = common_model(plans, sources)
    name = model.name if model else ", ".join(measured.models)
    return ReportData(
        title=title or f"Compressing the KV cache of {name}",
        version=__version__,
        model=model,
        texts=tuple(source.use for source in sources if source.use.texts),
        evaluations=measured.evaluations,
        plans=tuple(plan_view(plan) for plan in plans),
        spectrum=spectrum_of(run, plans),
        studies=tuple(_studies(run)),
        stability=measured.stability,
        speed=measured.speed,
        memory=measured.memory,
        answers=measured.answers,
        needles=measured.needles,
        recall=measured.recall,
    )


def _studies(run: Run) -> Iterator[StudyView]:
    """Every study of the run with the evaluations its cells name; files that are gone are left to the report to say."""
    for result in read_studies(run.root):
        found = {cell.file: e for cell in result.cells if cell.file and (e := cell_evaluation(run.root, cell))}
        yield StudyView(result, found, published_for(result.model))
