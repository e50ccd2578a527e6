"""aatc eval stability: one recipe calibrated on several Stats, and how far their plans agree on the same text.

Stats of two draws from the same texts (two seeds) tell how much is owed to the draw, Stats of two corpora how much to
the domain. Every Stats gets a Transform and a Plan of its own under RUN/stability/STATS.
"""

from __future__ import annotations

from pathlib import Path

from aatc_cli.artifacts.manifest import require_model
from aatc_cli.artifacts.stats import Stats
from aatc_cli.config import make_budget
from aatc_cli.errors import UsageError
from aatc_cli.evals import Task
from aatc_cli.evals.call import Call
from aatc_cli.evals.opened import open_subjects
from aatc_cli.evals.stability.measure import measure
from aatc_cli.evals.stability.result import Result
from aatc_cli.evals.stability.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.profiles import load_recipe
from aatc_cli.studies.calibrated import calibrated


def stability(task: Task, call: Call, settings: Settings) -> list[Result]:
    """Calibrate every recipe of the call on each of two or more Stats, and score all plans on the same windows.

    Raises `UsageError` for fewer than two Stats or no budget, `ArtifactError` for Stats of another model.
    """
    assert call.source is not None
    stats = [Path(name) for name in settings.stats]
    if len(stats) < 2 or len({path.name for path in stats}) < len(stats):
        raise UsageError("stability compares two or more Stats of different names", "repeat --stats")
    recipes = [load_recipe(name) for name in call.recipes or ("paper",)]
    for recipe in recipes:
        if recipe.choices.allocator.nothing:
            raise UsageError(f"recipe {recipe.name} is calibrated on nothing", "name a recipe that makes plans")
    if not call.budgets:
        raise UsageError("stability needs a budget to plan at", "add --budget 2")
    # what is under evaluation is made below: the model is opened with the recipes that it will be made of
    named = [Subject(recipe, None) for recipe in recipes]
    opened = open_subjects(task.name, call.run, call.source, named, call.options, call.profile)
    artifacts = [Stats.open(path) for path in stats]
    for artifact in artifacts:
        require_model(opened.identity, artifact.model, str(artifact.path))
    return [
        measure(
            opened, settings, [calibrated(opened, artifact, recipe, make_budget(bits=bits)) for artifact in artifacts]
        )
        for recipe in recipes
        for bits in call.budgets
    ]
