"""aatc study: every method of a study through every task, cell by cell, by the stages that single commands use.

Results are the ordinary files of those stages, so what is there is not computed again, and a study that was
interrupted goes on by the same command. What cannot be run is recorded with its reason, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aatc_cli.artifacts.locking import locked
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyResult, update_study
from aatc_cli.errors import UsageError
from aatc_cli.evals.subjects import EvalOptions
from aatc_cli.models.kept import keeping_models
from aatc_cli.models.loading import ModelSource, identify, leading_device, load_config, load_tokenizer
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile
from aatc_cli.studies.columns import columns_of
from aatc_cli.studies.definition import Study, StudyChoices, StudyTask, chosen_tasks
from aatc_cli.studies.methods import Methods, check_rows, methods_of
from aatc_cli.studies.sheet import Sheet


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
    # what is wrong with the study itself, or with what is chosen of it, is said before a model is loaded
    check_rows(study, choices.recipe, choices.row)
    tasks = chosen_tasks(study, choices.task)
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
        forget = partial(_forgotten, run, choices, {task.name for task in tasks})
        keep = forget if options.force else lambda result: result
        found = update_study(run.root, empty, keep, anew=options.force)
        known = {row.name: row for row in found.rows}
        # makers of plans in one run wait here for each other, where allocate would refuse
        with locked(run.studies, ".plans.lock", wait=True):
            device = leading_device(options.device, spread=options.spread)
            asked = partial(_asked, choices, tasks)
            entrants = Methods(run, known, options.force, device).entrants(study, choices.recipe, asked)
        if not entrants:
            raise UsageError("no task that is chosen asks any row that is chosen", "choose more by --row or --task")
        rows = [entrant.row for entrant in entrants]
        result = update_study(run.root, empty, lambda found: found.with_rows(rows, order))
        for task in () if choices.plans else tasks:
            for column in columns_of(source, task, choices, options):
                sheet = Sheet(run, column, result)
                sheet.fill(entrants)
                result = sheet.result
    return result


def _asked(choices: StudyChoices, tasks: Sequence[StudyTask], row: str) -> bool:
    """Whether a row is among the chosen ones and any of the tasks asks for it."""
    return choices.takes(row) and any(task.asks(row) for task in tasks)


def _forgotten(run: Run, choices: StudyChoices, tasks: set[str], result: StudyResult) -> StudyResult:
    """The result without the cells of the chosen methods and rows in ``tasks``, whose evaluations are removed."""
    recipes = choices.recipe
    names = {r.name for r in result.rows if (not recipes or r.recipe in recipes) and choices.takes(r.name)}
    gone = [cell for cell in result.cells if cell.row in names and cell.task_name in tasks]
    for cell in gone:
        if cell.file is not None:
            run.evaluation(cell.file).unlink(missing_ok=True)
    return result.model_copy(update={"cells": tuple(cell for cell in result.cells if cell not in gone)})
