"""What commands on files print on stdout: where an artifact lies, what is in it, what a dry run foresees."""

from __future__ import annotations

from pathlib import Path

import typer

from aatc_cli.console import print_json, print_table
from aatc_cli.stages.inspecting.facts import Inspection


def print_artifact(path: Path, digest: str, json: bool) -> None:
    """Where an artifact was written, and its digest."""
    if json:
        print_json({"path": str(path), "digest": digest})
    else:
        typer.echo(f"{path} {digest}")


def print_inspection(inspection: Inspection, json: bool) -> None:
    """The facts of an inspection: tables for people, or one JSON document."""
    if json:
        print_json(inspection.data)
        return
    for table in inspection.tables:
        print_table(table.title, table.columns, table.rows)
