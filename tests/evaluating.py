"""Tasks of eval called from Python, as the command line calls them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.files import Run
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.source import find_model


def measured(
    task: str, run: Run, model: Path, subjects: Sequence[Subject], options: EvalOptions | None = None, **asked: Any
) -> list[Any]:
    """Results of one task on ``subjects`` with the settings ``asked``; ``texts`` may be paths."""
    found = find_task(task)
    if "text" in asked:
        asked["text"] = tuple(map(str, asked["text"]))
    call = Call(run, options or EvalOptions(), find_model(str(model)), subjects=subjects)
    return list(found.call()(found, call, found.part("settings", "Settings")(**asked)))
