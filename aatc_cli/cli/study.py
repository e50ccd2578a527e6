"""The command study: a named study, by the stages that single commands use, and a table of its cells."""

from __future__ import annotations

from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aatc_cli.cli.making import given_settings, parameter, settings_parameters
from aatc_cli.cli.options import completed, shared

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.study import StudyResult

_Name = Annotated[
    str,
    typer.Argument(
        help="A study (main, headline, ...) or a .toml path.", metavar="NAME", autocompletion=completed("studies")
    ),
]


def study_parameters() -> list[Parameter]:
    """Parameters of the command."""
    from aatc_cli.studies.definition import StudyChoices

    last = shared("batch", "device", "device-map", "force", "json")
    name = parameter("name", _Name, Parameter.empty)
    return [name, *shared("run", "model"), *settings_parameters(StudyChoices), *last]


def study(values: dict[str, Any]) -> None:
    """Run every method of a study through its tasks (Evaluations), cell by cell.

    What is there is not run again, so an interrupted study goes on by the same command. Ends with exit code 1 if a cell
    is missing, and says why. Example: aatc study headline --limit 1
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.choosing import find_source
    from aatc_cli.console import print_json, say
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.studies.definition import StudyChoices, load_study
    from aatc_cli.studies.run import run_study

    choices, run = given_settings(StudyChoices, values), Run(values["run"])
    source, profile = find_source(values["model"], values["profile"])
    options = EvalOptions(
        values["device"], values["dtype"], values["force"], spread=values["device_map"] == "auto", batch=values["batch"]
    )
    result = run_study(run, source, load_study(values["name"]), choices, options, profile)
    if values["json"]:
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
