"""The command export: a plan to a folder or to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aatc_cli.cli.options import ForceOption, JsonOption


def export(
    plan: Annotated[Path, typer.Argument(help="Plan directory, or a folder that holds one plan.")],
    target: Annotated[str, typer.Argument(help="Folder to make, or hub:owner/name.")],
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write a plan as one folder that travels: plan, transform, what was measured, and a card.

    Every --plan takes such a folder, or hub:owner/name@COMMIT as printed here.

    Example: aatc export run/plans/paper-2 shipped
    """
    from dataclasses import asdict

    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.console import print_json
    from aatc_cli.stages.export import export as stage

    done = stage(find_plan(plan), target, force=force)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(f"{done.place} {done.digest}")
