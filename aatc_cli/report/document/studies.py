"""One section of the report per study: its figures and tables, as far as its tasks have any."""

from __future__ import annotations

from aatc_cli.report.blocks import FigureBlock, Section
from aatc_cli.report.data.study import StudyView
from aatc_cli.report.figures.quality import quality_figure
from aatc_cli.report.figures.scores import score_figure
from aatc_cli.report.series import studies as series
from aatc_cli.report.tables.forced import forced_tables
from aatc_cli.report.tables.studies import main_table, subtask_tables, task_tables, window_tables
from aatc_cli.report.text import number


def study_section(view: StudyView) -> Section:
    """Everything the study's cells give; in words how many are missing."""
    result, name = view.result, f"study-{view.result.study}".replace(".", "-")
    missing = sum(cell.file is None for cell in result.cells)
    command = f"aatc study {result.study}"
    state = (
        f"All {len(result.cells)} cells are there"
        if not missing
        else (f"{missing} of {len(result.cells)} cells are missing, with the reason at their place")
    )
    tables = [main_table(view), *window_tables(view), *subtask_tables(view), *forced_tables(view), *task_tables(view)]
    return Section(
        name,
        f"Study {result.study}",
        (f"{result.summary}. {state} ({command}).",),
        tuple(_figures(view, name)),
        tuple(table for table in tables if table is not None),
    )


def _figures(view: StudyView, name: str) -> list[FigureBlock]:
    found = []
    if panels := series.kl_panels(view):
        references = {number(panel.reference) for panel in panels if panel.reference is not None}
        fp16 = f" The float16 cache itself stands at {' and '.join(sorted(references))} nats." if references else ""
        drawn = quality_figure(panels, f"{name}-kl")
        caption = f"KL against packed bits; bars are one standard error.{fp16}"
        found.append(FigureBlock((drawn,), caption, f"{name}-kl"))
    if scores := series.sweep_panels(view):
        drawn = score_figure(scores, f"{name}-bits", "bits per channel")
        caption = "Score against bits per channel; bars are one standard error."
        found.append(FigureBlock((drawn,), caption, f"{name}-bits"))
    if contexts := series.context_panels(view):
        drawn = score_figure(contexts, f"{name}-context", "context (tokens)")
        caption = "Mean RULER score against context; bars are one standard error."
        found.append(FigureBlock((drawn,), caption, f"{name}-context"))
    return found
