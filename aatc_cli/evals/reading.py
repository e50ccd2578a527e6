"""Any result from its file, and its tables, by the task that the file says it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from aatc_cli.artifacts.disk import read_record
from aatc_cli.artifacts.evaluation import Evaluation, Measurement, read_evaluation, read_measurement
from aatc_cli.artifacts.evaluation import Task as TextTask
from aatc_cli.evals import TASKS, Task
from aatc_cli.evals.rows import Rows


def task_of(kind: str) -> Task | None:
    """The first task whose files call themselves ``kind``; None for an unknown one."""
    return next((task for task in TASKS if task.file_kind == kind), None)


def read_result(path: Path) -> Measurement:
    """The result in a file, of whichever task it says it is of; raises `ArtifactError` for anything else."""
    try:
        raw: Any = json.loads(read_record(path))
        task = task_of(str(raw.get("task"))) if isinstance(raw, dict) else None
    except (OSError, ValueError, RecursionError):
        task = None
    # what is of no task, the reader of evaluations on text refuses in its own words
    kind: type[Measurement] = task.part("result", "Result") if task else Evaluation
    return read_measurement(path, kind)


def read_evaluations(folder: Path) -> list[Evaluation]:
    """All evaluations on text in ``folder`` in a stable order: task, text, recipe, falling bits."""
    others = {task.file_kind for task in TASKS} - set(get_args(TextTask))
    paths = sorted(path for path in folder.glob("*.json") if path.name.split(".", 1)[0] not in others)
    found = [read_evaluation(path) for path in paths]
    return sorted(found, key=lambda e: (e.task, e.text, e.length, e.recipe != "fp16", e.recipe, -e.bits))


def result_tables(result: Measurement) -> list[Rows]:
    """The tables that eval prints of one result, but of an evaluation on text, which is a row of no table."""
    task = task_of(result.task)
    if task is None or (isinstance(result, Evaluation) and result.distortion is None):
        return []
    tables: list[Rows] = task.part("table", "tables")([result])
    return tables
