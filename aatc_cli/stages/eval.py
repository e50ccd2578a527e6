"""eval: open the model and what is measured on it, and hand both to the task."""

from __future__ import annotations

from typing import Any

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.evals import Task
from aatc_cli.evals.call import Call
from aatc_cli.evals.opened import open_subjects
from aatc_cli.models.placement import find_device


def evaluate(task: Task, call: Call, settings: Any) -> list[Measurement]:
    """Measure every subject of the call and write a file each; those that are there of the same are not run again.

    settings: of the task's own kind. Raises what the preamble raises (`evals.opened`), and what the task does.
    """
    if call.source is None:
        find_device(call.options.device)
        measured: list[Measurement] = task.part("measure", "measure_profile")(call, settings)
    else:
        opened = open_subjects(task.name, call.run, call.source, call.subjects, call.options, call.profile)
        measured = task.part("measure", "measure")(opened, settings)
    return measured
