"""Memory of a geometry alone: random vectors in stores of random widths with the budget's mean, layer by layer."""

from __future__ import annotations

import time

from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Budget, make_budget
from aatc_cli.errors import UsageError
from aatc_cli.evals.call import Call, require_own_dtype
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.memory.result import Result
from aatc_cli.evals.memory.settings import Settings
from aatc_cli.evals.memory.synthetic import synthetic_rows
from aatc_cli.evals.subjects import device_name
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import ModelProfile, load_recipe


def measure_geometry(call: Call, settings: Settings) -> list[Result]:
    """Memory of the caches of every recipe and budget of the call in its profile's geometry; one file each.

    Widths are those of `synthetic.random_widths` from seed 0; quantizer and transform do not change bytes: the plain
    ones are used. Raises `UsageError` without a budget, for a budget that a recipe's widths cannot have, and for a
    cache other than the packed one.
    """
    assert call.profile is not None
    if not call.budgets:
        raise UsageError("memory of a profile needs a budget", "add --budget 2.5, or measure a plan with --model")
    if call.options.cache not in ("auto", "packed"):
        raise UsageError(
            f"memory of a profile is that of the packed cache, not {call.options.cache}", "leave out --cache"
        )
    require_own_dtype(call.options, "float16")
    results = []
    for recipe in [load_recipe(name) for name in call.recipes or ("paper",)]:
        if recipe.choices.allocator.nothing:
            raise UsageError(f"{recipe.name} stands beside every plan already", "name another --recipe")
        if not recipe.packed:
            problem = f"{recipe.name} has no packed cache whose bytes could be measured: it is simulated"
            raise UsageError(problem, f"aatc inspect --profile {call.profile.name} --recipe {recipe.name} counts them")
        for budget in [make_budget(bits=value) for value in call.budgets]:
            if not recipe.min_bits <= budget.value <= recipe.max_bits:
                wanted = f"between {recipe.min_bits} and {recipe.max_bits}"
                raise UsageError(f"{recipe.name} has no widths of {budget.label} bits", f"give a --budget {wanted}")
            results.append(_kept(call, call.profile, recipe, budget, settings))
    return results


def _kept(call: Call, profile: ModelProfile, recipe: Recipe, budget: Budget, settings: Settings) -> Result:
    """The result that is there of the same, or a new one, written."""
    draft = Result(
        recipe=recipe.name,
        budget=budget.label,
        model=profile.model,
        bits=budget.value,
        cache="packed",
        protocol={
            "task": "memory",
            "geometry": profile.geometry.model_dump(mode="json"),
            "head_groups": profile.head_groups,
            "window": recipe.window.model_dump(mode="json"),
            "widths": [recipe.min_bits, recipe.max_bits, recipe.scale_bits],
            "context": list(settings.context),
            "batch": list(settings.batch),
            "device": call.options.device.partition(":")[0],
            "versions": {name: versions()[name] for name in ("aatc", "torch")},
        },
        seconds=0.0,
        device=device_name(call.options.device),
        dtype="float16",
        versions=versions(),
        synthetic=True,
        rows=[],
    )

    def measured() -> Result:
        began = time.perf_counter()
        sizes, rows = synthetic_rows(profile, recipe, budget, settings, call.options.device)
        return draft.model_copy(update={"seconds": time.perf_counter() - began, "rows": rows, **sizes})

    what = f"memory of {draft.method}, synthetic"
    return kept(call.run.evals, draft, what, force=call.options.force, measured=measured)
