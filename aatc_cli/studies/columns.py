"""Columns of a study: a text, a context or a whole benchmark each, and how the cells of one are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

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
from aatc_cli.studies.definition import StudyChoices, StudyTask, WindowTask
from aatc_cli.text.sources import parse_source

# subjects that share a reference pass, and whose matrices are held at once: more save little and lose more when
# interrupted
_TOGETHER = 8

Accept = Callable[[Measurement], None]
Stage = Callable[[Run, list[Subject], Accept], Sequence[Measurement]]


@dataclass(frozen=True)
class Column:
    """How its stage is called, in parts of how many subjects, what a cell says of itself, and which rows it asks."""

    cell: StudyCell
    stage: Stage
    together: int | None
    asks: Callable[[str], bool]

    def takes(self, recipe: Recipe) -> bool:
        """Whether a recipe can be asked: one whose press acts when a prompt ends is not where there is no prompt."""
        press = recipe.choices.press
        without = self.cell.task in ("kl", "perplexity", "recall") and self.cell.prompt is None
        return press.nothing or press.acts != "prompt" or not without


def columns_of(source: ModelSource, task: StudyTask, choices: StudyChoices, options: EvalOptions) -> Iterator[Column]:
    """The columns of one task of a study: a text, a context or a whole benchmark each."""
    limit = task.limit if choices.limit is None else choices.limit
    # what is replaced was removed before: a stage that is told to would drop the rows of other contexts with it
    options = replace(options, force=False, cache=task.cache)

    def column(together: int | None, shown: dict[str, Any], **asked: Any) -> Column:
        cell = StudyCell(row="", task=task.task, **shown)
        stage = partial(_measured, source, task.task, {**asked, "limit": limit}, options)
        return Column(cell, stage, together, task.asks)

    if task.task in get_args(WindowTask):
        yield from _of_windows(task, choices, column)
    elif task.task in ("ruler", "turns"):
        yield from _of_contexts(task, choices, column)
    elif task.task == "needles":
        yield _of_places(task, choices, column)
    else:
        asked: dict[str, Any] = {"subtask": task.subtasks}
        if task.task == "references":
            length = choices.length or task.length
            asked |= {"length": length, **({"data": choices.data} if choices.data else {})}
            yield column(None, {"subtasks": task.subtasks, "length": length}, **asked)
        else:
            yield column(None, {"subtasks": task.subtasks}, **asked, chat=task.chat, data=_data(task, choices))


def _of_windows(task: StudyTask, choices: StudyChoices, column: Callable[..., Column]) -> Iterator[Column]:
    """A column for every text."""
    length, tokens = choices.length or task.length, choices.tokens or task.tokens
    for text in dict.fromkeys((*task.texts, *(choices.text if task.given_too or not task.texts else ()))):
        shown: dict[str, Any] = {"text": parse_source(text).name, "prompt": task.prompt}
        asked: dict[str, Any] = {"text": (text,)}
        if task.task == "accumulate":
            asked |= {
                "tokens": tokens,
                "way": task.ways,
                "seed": task.seed,
                "at_once": task.at_once,
                **({"prompt": task.prompt} if task.prompt else {}),
            }
            yield column(_TOGETHER, shown | {"length": tokens}, **asked)
            continue
        asked["length"] = length
        if task.task != "recall":
            asked["first"] = task.first
        if task.prompt is not None:
            asked["prompt"] = task.prompt
        yield column(_TOGETHER, shown | {"length": length}, **asked)


def _of_contexts(task: StudyTask, choices: StudyChoices, column: Callable[..., Column]) -> Iterator[Column]:
    """A column for every context."""
    texts = task.texts or choices.text
    for context in choices.context or task.contexts:
        asked: dict[str, Any] = {"context": (context,), "seed": task.seed, "text": texts}
        shown: dict[str, Any] = {"context": context, "subtasks": task.subtasks}
        if task.task == "ruler":
            asked |= {"subtask": task.subtasks, "chat": task.chat, "data": _data(task, choices), "mode": task.mode}
            shown["mode"] = None if task.mode == "generate" else task.mode
        yield column(None, shown, **asked)


def _of_places(task: StudyTask, choices: StudyChoices, column: Callable[..., Column]) -> Column:
    """One column: a map of all contexts and depths."""
    asked: dict[str, Any] = {"context": choices.context or task.contexts, "text": task.texts or choices.text}
    asked |= {
        "seed": task.seed,
        "chat": task.chat,
        "mode": task.mode,
        **({"depth": task.depths} if task.depths else {}),
    }
    return column(None, {"mode": None if task.mode == "generate" else task.mode}, **asked)


def _measured(
    source: ModelSource,
    name: str,
    asked: dict[str, Any],
    options: EvalOptions,
    place: Run,
    subjects: list[Subject],
    accept: Accept,
) -> Sequence[Measurement]:
    """Results of one task of eval, by the stage that the single command uses; ``accept`` sees them before."""
    task, options = find_task(name), replace(options, accept=accept)
    return evaluate(task, Call(place, options, source, subjects=subjects), task.part("settings", "Settings")(**asked))


def _data(task: StudyTask, choices: StudyChoices) -> str | None:
    """Where a benchmark's files are: the hub, its own folder in the folder given, or nowhere said."""
    if choices.data is None or choices.data == "hub":
        return choices.data
    if not Path(choices.data).is_dir():
        raise AatcError(f"there is no folder {choices.data}", "give the folder of benchmark folders, or hub")
    folder = Path(choices.data) / task.task
    return str(folder) if folder.is_dir() else None
