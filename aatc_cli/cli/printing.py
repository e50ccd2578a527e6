"""What commands print on stdout: tables for people, or one JSON document with --json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.console import print_json, print_table
from aatc_cli.evals import Task


def print_results(task: Task, results: Sequence[Measurement], json: bool, folder: Path) -> None:
    """Results of one task, as its own tables; as JSON with the ``path`` of the file in ``folder`` that holds each."""
    if json:
        places = [folder / result.file_name for result in results]
        print_json([r.model_dump(mode="json") | {"path": str(path)} for r, path in zip(results, places, strict=True)])
        return
    for table in task.part("table", "tables")(results):
        print_table(*table)
