"""The stability task of the eval command: recipes and Stats to the stage, one table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.models.loading import ModelSource
    from aatc_cli.stages.evaluate import EvalSettings


def run_stability(
    run: Run,
    source: ModelSource,
    recipes: list[str] | None,
    budgets: list[float] | None,
    stats: list[Path] | None,
    texts: list[str],
    settings: EvalSettings,
    options: EvalOptions,
    json: bool,
) -> None:
    """``--task stability``: every recipe and budget, calibrated on each of ``stats``; raises `UsageError`."""
    from aatc_cli.cli.printing import print_stability
    from aatc_cli.config import make_budget
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_recipe
    from aatc_cli.studies.stability import stability

    if not budgets:
        raise UsageError("stability needs a budget to plan at", "add --budget 2")
    results = [
        stability(run, source, load_recipe(name), make_budget(bits=bits), stats or [], texts, settings, options)
        for name in recipes or ["paper"]
        for bits in budgets
    ]
    print_stability(results, json)
