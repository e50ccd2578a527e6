"""What commands print on stdout: tables for people, or one JSON document with --json."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.console import print_json, print_table
from aatc_cli.evals import Task


def print_results(task: Task, results: Sequence[Measurement], json: bool) -> None:
    """Results of one task, as its own tables."""
    if json:
        print_json([result.model_dump(mode="json") for result in results])
        return
    for table in task.part("table", "tables")(results):
        print_table(*table)
