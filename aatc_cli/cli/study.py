"""aatc study: a named study, by the stages that single commands use, and a table of its cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aatc_cli.cli.options import (
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RunOption,
)

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.study import StudyResult


def study(
    name: Annotated[str, typer.Argument(help="A study (main, headline, ...) or a .toml path.", metavar="NAME")],
    run: RunOption = Path("run"),
    profile: ProfileOption = None,
    model: ModelOption = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", help="Only these of the study's methods; several allowed.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Held-out text of tasks that name none; several allowed.")
    ] = None,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Tokens per window, of all tasks.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Windows per text or samples per subtask, of all tasks.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Contexts of RULER; several allowed.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Folder with a folder of files for each benchmark, or hub.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts at once; changes no result.")] = 1,
    device: DeviceOption = "cpu",
    device_map: DeviceMapOption = "none",
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Run every method of a study through its tasks (Evaluations), cell by cell.

    What is there is not run again, so an interrupted study goes on by the same command. Ends with exit code 1 if a cell
    is missing, and says why. Example: aatc study headline --limit 1
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.choosing import find_source
    from aatc_cli.console import print_json, say
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.studies.definition import load_study
    from aatc_cli.studies.run import StudyChoices, run_study

    source, found = find_source(model, profile)
    choices = StudyChoices(
        texts=tuple(text or ["builtin:python-docs-test"]),
        recipes=tuple(recipe or ()),
        limit=limit,
        length=length,
        contexts=tuple(context or ()),
        data=data,
    )
    options = EvalOptions(device, dtype, force, spread=device_map == "auto", batch=batch)
    result = run_study(Run(run), source, load_study(name), choices, options, found)
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        _print_cells(Run(run), result)
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
