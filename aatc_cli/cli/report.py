"""The command report: the run's report, and where its files are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aatc_cli.cli.options import JsonOption, RunOption


def report(
    run: RunOption = Path("run"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the report.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the run's report: Markdown, CSV, JSON and one self-contained HTML file with plots; say where they are."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.console import print_json, print_table, working
    from aatc_cli.stages.report import make_report

    with working("writing the report"):
        files = make_report(Run(run), title=title)
    places = {"html": files.html, "markdown": files.markdown, "csv": files.csv, "json": files.json}
    if json:
        print_json({kind: str(path) for kind, path in places.items()})
        return
    print_table(f"report of {run}", ["form", "file"], [[kind, str(path)] for kind, path in places.items()])
