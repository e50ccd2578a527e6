"""Columns of a study: a text, a context or a whole benchmark each, and how the cells of one are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell
from aatc_cli.errors import AatcError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import ModelSource
from aatc_cli.stages.eval import evaluate
from aatc_cli.studies.definition import StudyChoices, StudyTask
from aatc_cli.text.sources import parse_source

# subjects that share a reference pass, and whose matrices are held at once: more save little and lose more when
# interrupted
_TOGETHER = 8

Stage = Callable[[Run, list[Subject]], Sequence[Measurement]]


@dataclass(frozen=True)
class Column:
    """How its stage is called, in parts of how many subjects, and what a cell says of itself."""

    cell: StudyCell
    stage: Stage
    together: int | None

    def asks(self, recipe: Recipe) -> bool:
        """Whether a recipe is asked: one whose press acts when a prompt ends is not where there is no prompt."""
        press = recipe.choices.press
        return self.cell.length is None or self.cell.prompt is not None or press.nothing or press.acts != "prompt"


def columns_of(source: ModelSource, task: StudyTask, choices: StudyChoices, options: EvalOptions) -> Iterator[Column]:
    """The columns of one task of a study: a text, a context or a whole benchmark each."""
    limit = task.limit if choices.limit is None else choices.limit
    texts = task.texts or choices.text
    # what is replaced was removed before: a stage that is told to would drop the rows of other contexts with it
    options = replace(options, force=False)
    answers = {"limit": limit, "subtask": task.subtasks, "chat": task.chat}

    def stage(**asked: Any) -> Stage:
        return partial(_measured, source, task.task, asked, options)

    if task.task in ("kl", "perplexity"):
        length = choices.length or task.length
        for text in texts:
            name = parse_source(text).name
            cell = StudyCell(row="", task=task.task, text=name, length=length, prompt=task.prompt or None)
            asked = {"text": (text,), "length": length, "limit": limit, "first": task.first, "prompt": task.prompt}
            yield Column(cell, stage(**asked), _TOGETHER)
    elif task.task == "ruler":
        for context in choices.context or task.contexts:
            asked = {**answers, "context": (context,), "seed": task.seed, "data": _data(task, choices)}
            cell = StudyCell(row="", task="ruler", context=context, subtasks=task.subtasks)
            yield Column(cell, stage(**asked, text=texts), None)
    else:
        cell = StudyCell(row="", task=task.task, subtasks=task.subtasks)
        yield Column(cell, stage(**answers, data=_data(task, choices)), None)


def _measured(
    source: ModelSource, name: str, asked: dict[str, Any], options: EvalOptions, place: Run, subjects: list[Subject]
) -> Sequence[Measurement]:
    """Results of one task of eval, by the stage that the single command uses."""
    task = find_task(name)
    return evaluate(task, Call(place, options, source, subjects=subjects), task.part("settings", "Settings")(**asked))


def _data(task: StudyTask, choices: StudyChoices) -> str | None:
    """Where a benchmark's files are: the hub, its own folder in the folder given, or nowhere said."""
    if choices.data is None or choices.data == "hub":
        return choices.data
    if not Path(choices.data).is_dir():
        raise AatcError(f"there is no folder {choices.data}", "give the folder of benchmark folders, or hub")
    folder = Path(choices.data) / task.task
    return str(folder) if folder.is_dir() else None
