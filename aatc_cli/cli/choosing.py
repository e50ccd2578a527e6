"""What the values of shared options stand for: models, budgets, plans."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.config import Budget
    from aatc_cli.evals.subjects import Subject
    from aatc_cli.methods.recipe import Recipe
    from aatc_cli.models.source import ModelSource
    from aatc_cli.profiles import ModelProfile


def named_source(model: str | None) -> ModelSource:
    """The model of a command that knows no profiles; raises `UsageError` when none was named."""
    from aatc_cli.errors import UsageError
    from aatc_cli.models.source import find_model

    if model is None:
        raise UsageError("no model was named", "give --model (hub id, folder or .gguf), or set AATC_MODEL")
    return find_model(model)


def find_source(model: str | None, profile: str | None) -> tuple[ModelSource, ModelProfile | None]:
    """The model named by --model or, without it, by the profile; raises `UsageError` when neither names one."""
    from aatc_cli.errors import UsageError
    from aatc_cli.models.source import find_model
    from aatc_cli.profiles import load_model_profile

    found = load_model_profile(profile) if profile is not None else None
    if model is None and found is None:
        raise UsageError("no model was named", "give --model (hub id, folder or .gguf) or --profile, or set AATC_MODEL")
    return find_model(model if model is not None else found.model if found else ""), found


def budgets_of(budget: list[float] | None, ratio: float | None, size: str | None, context: int | None) -> list[Budget]:
    """Budgets of the options --budget (several allowed), --ratio and --bytes; raises `UsageError`."""
    from aatc_cli.config import make_budget

    if budget and ratio is None and size is None:
        return [make_budget(bits=value) for value in budget]
    return [make_budget(bits=budget[0] if budget else None, ratio=ratio, size=size, context=context)]


def matching(paths: Sequence[Path | str]) -> list[str]:
    """Every path, and for a pattern like ``run/plans/*`` all that match it in name order; raises `UsageError`."""
    from aatc_cli.errors import UsageError

    found: list[str] = []
    for path in paths:
        pattern = str(path)
        if Path(path).exists() or not glob.has_magic(pattern):
            found.append(pattern)
            continue
        matches = sorted(glob.glob(pattern))
        if not matches:
            raise UsageError(f"nothing matches {pattern}", "give the directory of a plan, as run/plans/paper-2")
        found += matches
    return found


def subjects_of(
    run: Run, recipe: list[str] | None, budget: list[float] | None, plan: Sequence[Path | str] | None
) -> list[Subject]:
    """Plans named by --plan and by every combination of --recipe and --budget, or all of the run where none is named.

    Raises `UsageError` for a recipe that needs a budget, `SettingsMismatchError` for a plan made with another recipe of
    the name.
    """
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.config import make_budget
    from aatc_cli.errors import ArtifactError, UsageError
    from aatc_cli.evals.subjects import Subject
    from aatc_cli.profiles import load_recipe

    if not recipe and not budget and not plan:
        plan = run.plans()
        if not plan:
            raise ArtifactError(f"there is no plan in {run.root}", "run aatc allocate to make one, or name the --run")
    subjects = [
        Subject(opened.recipe, opened) for opened in (Plan.open(find_plan(name)) for name in matching(plan or []))
    ]
    for name in recipe or (["paper"] if budget else []):
        loaded = load_recipe(name)
        if loaded.choices.allocator.nothing:
            subjects.append(Subject(loaded, None))
            continue
        if not budget:
            raise UsageError(f"recipe {name} needs a budget", "add --budget 2.0, or name plans by --plan")
        for value in budget:
            opened = Plan.open(run.plan(loaded.name, make_budget(bits=value)))
            _require_recipe(loaded, opened.recipe, str(opened.path))
            subjects.append(Subject(opened.recipe, opened))
    return _distinct(subjects)


def _require_recipe(named: Recipe, planned: Recipe, what: str) -> None:
    """Raise `SettingsMismatchError` naming what differs between the recipe that was named and the plan's own."""
    from aatc_cli.artifacts.changes import changes_in_words
    from aatc_cli.errors import SettingsMismatchError

    changed = [
        text
        for text in changes_in_words(planned.model_dump(mode="json"), named.model_dump(mode="json"))
        if not text.startswith("summary ")
    ]
    if changed:
        raise SettingsMismatchError(
            f"{what} was made with another recipe {named.name}: {'; '.join(changed[:5])}",
            "make the plan anew: aatc allocate --force with this recipe, or name the plan itself by --plan",
        )


def _distinct(subjects: list[Subject]) -> list[Subject]:
    """Each plan once, in the order named; raises `UsageError` for two plans of one name."""
    from aatc_cli.errors import UsageError

    found: dict[str, Subject] = {}
    for subject in subjects:
        known = found.setdefault(subject.name, subject)
        digests = [one.plan.digest if one.plan else None for one in (known, subject)]
        if digests[0] != digests[1]:
            problem = f"two different plans are called {subject.name}: their results would have one name"
            raise UsageError(problem, "evaluate them one after the other, into different --run directories")
    return list(found.values())
