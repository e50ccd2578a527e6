"""The command list: names that options take."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from aatc_cli.cli.options import JsonOption


def list_known(
    kind: Annotated[
        Literal["recipes", "profiles", "studies", "models", "tasks"],
        typer.Argument(help="For --recipe, --profile, study and eval; models: the architectures of --model."),
    ],
    json: JsonOption = False,
) -> None:
    """List what this installation knows by name. No model and no run is needed.

    Examples: aatc list recipes; aatc list profiles --json | jq -r '.[].name'
    """
    from aatc_cli.console import print_json, print_table
    from aatc_cli.stages.listing import listing

    found = listing(kind)
    if json:
        print_json(found.data)
    else:
        print_table(found.title, found.columns, found.rows)
