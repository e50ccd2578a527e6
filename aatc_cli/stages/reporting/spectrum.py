"""Energies of latent channels with the water levels of the plans, and a plan as the report shows it."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Floats
from aatc_cli.report.data.run import Absent, PlanView, Spectrum
from aatc_cli.report.document.plans import NO_PLANS


def plan_view(plan: Plan) -> PlanView:
    """A plan as the report shows it."""
    return PlanView(
        recipe=plan.recipe.name,
        budget=plan.budget.label,
        digest=plan.digest,
        protected=plan.geometry.leading(plan.recipe.protect.layers),
        groups=plan.groups,
        bits=plan.bits,
        bits_mean=plan.mean_bits,
        predicted=dict(plan.predicted),
        water_level=dict(plan.water_level),
        layout=plan.layout,
        shares=plan.classes.shares if plan.classes.count > 1 else (1,),
    )


def spectrum_of(run: Run, plans: Sequence[Plan]) -> Spectrum | Absent:
    """Energies of the first unprotected, the middle and the last layer under the paper's recipe, or the first one."""
    if not plans:
        return Absent(NO_PLANS)
    recipe = plans[0].recipe
    place = run.transform(recipe.transform_name)
    if not place.exists():
        return Absent(f"No transform {recipe.transform_name!r} in this run to take the spectrum from: aatc whiten")
    transform = Transform.open(place)
    chosen = [plan for plan in plans if plan.recipe == recipe]
    if not all(plan.made_from(transform) for plan in chosen):
        return Absent(f"The plans of {recipe.name} were not made from this run's transform: aatc allocate --force")
    energies = transform.energies()
    last = len(energies) - 1
    first = min(chosen[0].geometry.leading(recipe.protect.layers), last)
    layers = tuple(sorted({first, (first + last) // 2, last}))
    energy: dict[tuple[int, Side], Floats] = {
        (layer, side): recipe.choices.energy(energies[layer][side], side) for layer in layers for side in SIDES
    }
    views = [plan_view(plan) for plan in chosen]
    levels = tuple(
        (f"{view.budget} bits" if plan.budget.unit == "bits" else view.budget, view.water_level)
        for plan, view in zip(chosen, views, strict=True)
    )
    return Spectrum(recipe.name, layers, energy, levels)
