"""A plan made from some Stats alone, with its Transform in a run of their own."""

from __future__ import annotations

from aatc_cli.artifacts.stats import Stats
from aatc_cli.config import Budget
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.stability.measure import Calibrated
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.whiten import Wanted, whiten


def calibrated(opened: Opened, stats: Stats, recipe: Recipe, budget: Budget) -> Calibrated:
    """The plan of a recipe at a budget under RUN/stability/STATS; raises `SettingsMismatchError` where others lie."""
    place, force = opened.run.within("stability", stats.path.name), opened.options.force
    whiten(place, transform_stats=stats.path, rate_stats=stats.path, wanted=Wanted.by(recipe), force=force)
    return Calibrated(stats, allocate(place, recipe, [budget], force=force)[0])
