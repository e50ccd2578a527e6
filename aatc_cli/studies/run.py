"""aatc study: every method of a study through every task, cell by cell, by the stages that single commands use.

Results are the ordinary files of those stages, so what is there is not computed again, and a study that was
interrupted goes on by the same command. What cannot be run is recorded with its reason, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.artifacts.locking import locked
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell, StudyResult, update_study
from aatc_cli.console import say
from aatc_cli.errors import AatcError, SettingsMismatchError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.kept import keeping_models
from aatc_cli.models.loading import ModelSource, identify, load_config, load_tokenizer
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.eval import evaluate
from aatc_cli.studies.definition import Study, StudyTask
from aatc_cli.studies.methods import Entrant, Methods, methods_of, reason_of
from aatc_cli.text.sources import parse_source

# subjects that share a reference pass, and whose matrices are held at once: more save little and lose more when
# interrupted
_TOGETHER = 8

Stage = Callable[[Run, list[Subject]], Sequence[Measurement]]


@dataclass(frozen=True)
class StudyChoices:
    """What a call changes of a study: texts where a task names none, and limits, lengths and methods of all tasks.

    ``data``: "hub", or a folder with a folder of files for each benchmark, by its task name.
    """

    texts: tuple[str, ...] = ("builtin:python-docs-test",)
    recipes: tuple[str, ...] = ()
    limit: int | None = None
    length: int | None = None
    contexts: tuple[int, ...] = ()
    data: str | None = None


@dataclass(frozen=True)
class _Job:
    """One column of cells: how its stage is called, in parts of how many subjects, and what a cell says of itself."""

    cell: StudyCell
    stage: Stage
    together: int | None


def run_study(
    run: Run,
    source: ModelSource,
    study: Study,
    choices: StudyChoices,
    options: EvalOptions,
    profile: ModelProfile | None = None,
) -> StudyResult:
    """Run what is missing of ``study`` and write its result after every step; the whole result as it is now.

    ``options.force`` removes the evaluations of the chosen methods in this study first. Raises `AatcError` for a study
    or a model that nothing can be done with, and not for single cells.
    """
    methods_of(study, choices.recipes)  # what is wrong with the study itself is said before a model is loaded
    order = [(recipe.name, method.stats) for method, recipe in methods_of(study)]
    with keeping_models():
        tokenizer = load_tokenizer(source)
        identity = identify(source, load_config(source), tokenizer)
        check_profile(profile, identity.geometry)
        empty = StudyResult(
            study=study.name,
            summary=study.summary,
            model=identity.name,
            model_fingerprint=str(identity.weights_fingerprint),
        )
        forget = partial(_forgotten, run, choices.recipes) if options.force else lambda result: result
        known = {row.name: row for row in update_study(run.root, empty, forget).rows}
        # makers of plans in one run wait here for each other, where allocate would refuse
        with locked(run.studies, ".plans.lock", wait=True):
            entrants = Methods(run, known, options.force).entrants(study, choices.recipes)
        rows = [entrant.row for entrant in entrants]
        result = update_study(run.root, empty, lambda found: found.with_rows(rows, order))
        for task in study.tasks:
            for job in _jobs(source, task, choices, options):
                sheet = _Sheet(run, job, result)
                sheet.fill(entrants)
                result = sheet.result
    return result


def _forgotten(run: Run, recipes: tuple[str, ...], result: StudyResult) -> StudyResult:
    """The result without the cells of ``recipes`` (all if none), whose evaluations are removed."""
    names = {row.name for row in result.rows if not recipes or row.recipe in recipes}
    for cell in result.cells:
        if cell.row in names and cell.file is not None:
            run.evaluation(cell.file).unlink(missing_ok=True)
    return result.model_copy(update={"cells": tuple(cell for cell in result.cells if cell.row not in names)})


class MixedProtocolsError(SettingsMismatchError):
    """Cells of one column would be of different windows, settings, dtypes or versions."""


@dataclass
class _Sheet:
    """Fills the cells of one job and keeps the result on disk up to date."""

    run: Run
    job: _Job
    result: StudyResult
    places: dict[Path, list[Entrant]] = field(default_factory=dict)

    def fill(self, entrants: Sequence[Entrant]) -> None:
        """Every entrant: those without a subject at once, the others by their run and in parts."""
        self._put([self._cell(c, reason=c.row.reason) for c in entrants if c.subject is None])
        for entrant in entrants:
            if entrant.subject is not None:
                self.places.setdefault(entrant.place.root, []).append(entrant)
        for members in self.places.values():
            size = self.job.together or len(members)
            for start in range(0, len(members), size):
                self._attempt(members[start : start + size])

    def _attempt(self, members: list[Entrant]) -> None:
        """Run the stage; where it fails, on each half, so that one method cannot take the others with it."""
        try:
            self._run(members)
        except MixedProtocolsError:
            raise
        except Exception as error:  # anything a method may raise: running out of memory, a codec without a kernel, ...
            reason = reason_of(error, self.run.root)
            if len(members) == 1 or (isinstance(error, AatcError) and self._fails_for_all(members, reason)):
                names = ", ".join(member.row.name for member in members)
                say(f"study: {self.job.cell.column} is missing of {names}: {reason}")
                self._put([self._cell(member, reason=reason) for member in members])
                return
            middle = len(members) // 2
            self._attempt(members[:middle])
            self._attempt(members[middle:])

    def _fails_for_all(self, members: list[Entrant], reason: str) -> bool:
        """Whether the first and the last alone fail for the same reason: then it is the task's and no method's."""
        for member in (members[0], members[-1]):
            try:
                self._run([member])
            except Exception as error:
                if reason_of(error, self.run.root) == reason:
                    continue
            return False
        return True

    def _run(self, members: Sequence[Entrant]) -> None:
        """Run the stage for these, all of one place, and put down their cells."""
        place = members[0].place
        found = self.job.stage(place, [member.subject for member in members if member.subject])
        cells = []
        for member, measured in zip(members, found, strict=True):
            path = (place.evals / measured.file_name).relative_to(self.run.root)
            left_out = getattr(measured, "left_out", {})
            protocol = None if measured.protocol is None else digest_of(measured.protocol)
            cells.append(self._cell(member, file=path.as_posix(), left_out=left_out, protocol=protocol))
        self._check_protocol(cells)
        self._put(cells)

    def _check_protocol(self, cells: list[StudyCell]) -> None:
        """Raise `MixedProtocolsError` where others of the column were measured on something else."""
        for old in self.result.cells:
            if old.column == cells[0].column and old.protocol not in (None, cells[0].protocol):
                raise MixedProtocolsError(
                    f"the study has {old.column} of {old.row} measured on something else ({old.file}, now "
                    f"{cells[0].file}): one column would show both",
                    "add --force to measure all of it anew, or give the study another name",
                )

    def _cell(self, entrant: Entrant, **changes: object) -> StudyCell:
        return self.job.cell.model_copy(update={"row": entrant.row.name, **changes})

    def _put(self, cells: list[StudyCell]) -> None:
        self.result = update_study(self.run.root, self.result, lambda found: found.with_cells(cells))


def _jobs(source: ModelSource, task: StudyTask, choices: StudyChoices, options: EvalOptions) -> Iterator[_Job]:
    """The columns of one task of a study: a text, a context or a whole benchmark each."""
    limit = task.limit if choices.limit is None else choices.limit
    texts = task.texts or choices.texts
    # what is replaced was removed before: a stage that is told to would drop the rows of other contexts with it
    options = replace(options, force=False)
    answers = {"limit": limit, "subtask": task.subtasks, "chat": task.chat}

    def stage(**asked: Any) -> Stage:
        return partial(_measured, source, task.task, asked, options)

    if task.task in ("kl", "perplexity"):
        length = choices.length or task.length
        for text in texts:
            cell = StudyCell(row="", task=task.task, text=parse_source(text).name, length=length)
            yield _Job(cell, stage(text=(text,), length=length, limit=limit, first=task.first), _TOGETHER)
    elif task.task == "ruler":
        for context in choices.contexts or task.contexts:
            asked = {**answers, "context": (context,), "seed": task.seed, "data": _data(task, choices)}
            cell = StudyCell(row="", task="ruler", context=context, subtasks=task.subtasks)
            yield _Job(cell, stage(**asked, text=texts), None)
    else:
        cell = StudyCell(row="", task=task.task, subtasks=task.subtasks)
        yield _Job(cell, stage(**answers, data=_data(task, choices)), None)


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
