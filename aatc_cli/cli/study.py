"""The option --study of the eval command: options to choices, stage, a table of cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.study import StudyResult
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.models.loading import ModelSource


def only_study(budget: list[float] | None, plan: list[Path] | None, subtask: list[str] | None) -> None:
    """Raise `UsageError` for options that say what the study itself says."""
    from aatc_cli.errors import UsageError

    given = (("--budget", budget), ("--plan", plan), ("--subtask", subtask))
    named = [option for option, value in given if value]
    if named:
        problem = f"{named[0]} does not go with --study, which names its own"
        raise UsageError(problem, "leave it out, or give a study of your own as a .toml file")


def run_study(
    run: Run,
    source: ModelSource,
    study: str,
    options: EvalOptions,
    json: bool,
    *,
    texts: list[str],
    recipes: list[str] | None,
    limit: int | None,
    length: int | None,
    contexts: list[int] | None,
    data: str | None,
    batch: int,
) -> None:
    """Run a study, print its cells, and end with exit code 1 if any is missing."""
    from aatc_cli.console import print_json, say
    from aatc_cli.studies.definition import load_study
    from aatc_cli.studies.run import StudyChoices, run_study

    choices = StudyChoices(
        texts=tuple(texts),
        recipes=tuple(recipes or ()),
        limit=limit,
        length=length,
        contexts=tuple(contexts or ()),
        data=data,
        batch=batch,
    )
    result = run_study(run, source, load_study(study), choices, options)
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        _print_cells(run, result)
    for reason, count in result.missing.items():
        say(f"study {result.study}: {count} missing: {reason}")
    missing = sum(result.missing.values())
    say(f"study {result.study}: {len(result.cells) - missing} of {len(result.cells)} cells are there")
    if missing:
        raise typer.Exit(1)


def _print_cells(run: Run, result: StudyResult) -> None:
    from aatc_cli.console import print_table
    from aatc_cli.evals.study_scores import cell_score

    columns = list(dict.fromkeys(cell.column for cell in result.cells))
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    rows = []
    for row in result.rows:
        bits = "" if row.bits_packed is None else f"{row.bits_packed:.3f}"
        shown = []
        for column in columns:
            cell = cells.get((row.name, column))
            score = cell_score(run.root, cell) if cell else None
            shown.append("" if cell is None else "missing" if score is None else score.text)
        rows.append([row.name, bits, *shown])
    print_table(f"study {result.study}", ["method", "packed bits", *columns], rows)
