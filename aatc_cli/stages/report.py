"""`report`: a run's plans and evaluations as Markdown, one HTML page, CSV and JSON. Runs no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aatc_cli.artifacts.disk import write_text
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.run import Run
from aatc_cli.report.document.build import build_document
from aatc_cli.report.render.files import render_csv, render_json
from aatc_cli.report.render.markdown import render_markdown
from aatc_cli.report.render.page import render_figures, render_html
from aatc_cli.stages.reporting.load import load_report


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
