"""What inspect and --dry-run print on stdout."""

from __future__ import annotations

from aatc_cli.console import print_json, print_table
from aatc_cli.stages.inspecting.facts import Inspection


def print_inspection(inspection: Inspection, json: bool) -> None:
    """The facts of an inspection: tables for people, or one JSON document."""
    if json:
        print_json(inspection.data)
        return
    for table in inspection.tables:
        print_table(table.title, table.columns, table.rows)
