"""The command allocate: plans from recipes and budgets, and --check of plans that exist."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aatc_cli.cli.choosing import budgets_of, matching
from aatc_cli.cli.making import given_settings, parameter, settings_parameters
from aatc_cli.cli.options import shared

if TYPE_CHECKING:
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.stages.allocate import Unmet


_More = Annotated[list[Path] | None, typer.Argument(metavar="[PLAN]...", help="With --check: further plans to check.")]


def allocate_parameters() -> list[Parameter]:
    """Parameters of the command."""
    from aatc_cli.cli.asked import AllocateAsked

    budgets, last = shared("run", "budgets", "ratio", "bytes"), shared("dry-run", "force", "json")
    return [parameter("more", _More, None), *budgets, *settings_parameters(AllocateAsked), *last]


def allocate(values: dict[str, Any]) -> None:
    """Give every channel its width (Plan), one plan per recipe and budget. Deterministic.

    A budget that cannot be met is named in the end, with exit code 1; the others are made.
    Examples: aatc allocate --budget 2.0; aatc allocate --recipe var-only --budget 4,3;
    aatc allocate --bytes 184MB --context 8192; aatc allocate --check run/plans/*
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.asked import AllocateAsked
    from aatc_cli.cli.inspections import print_inspection
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_recipe

    asked, more, run, json = given_settings(AllocateAsked, values), values["more"], Run(values["run"]), values["json"]
    if asked.check is not None:
        _refuse_beside_check(values)
        check_plans(matching([asked.check, *(more or [])]), asked.transform, json)
        return
    if more:
        raise UsageError(f"{more[0]} is no option of allocate", f"to check a plan: aatc allocate --check {more[0]}")
    budgets = budgets_of(values["budget"], values["ratio"], values["bytes"], asked.context)
    recipes, context = [load_recipe(name) for name in values["recipe"] or ["paper"]], asked.context or 8192
    if values["dry_run"]:
        from aatc_cli.stages.inspecting.forecast_algebra import forecast_allocate

        print_inspection(forecast_allocate(run, recipes, budgets, asked.transform, context).inspection(), json)
        return
    from aatc_cli.stages.allocate import allocate as stage

    unmet: list[Unmet] = []
    how: dict[str, Any] = {"transform": asked.transform, "force": values["force"], "unmet": unmet}
    plans = [plan for each in recipes for plan in stage(run, each, budgets, **how)]
    if plans:
        print_plans(plans, context, json)
    if unmet:
        raise _of_unmet(unmet, len(plans))


def _refuse_beside_check(values: dict[str, Any]) -> None:
    from aatc_cli.errors import UsageError

    budgeted = values["budget"] or values["ratio"] is not None or values["bytes"] is not None
    if values["recipe"] or budgeted or values["dry_run"]:
        raise UsageError("--check takes recipe and budget from the plan", "leave out --recipe, --budget and so on")


def print_plans(plans: list[Plan], tokens: int, json: bool) -> None:
    """What was planned, with bytes at ``tokens`` tokens."""
    from aatc_cli.console import print_json, print_table
    from aatc_cli.stages.inspecting.plan import kl_forecast

    facts: list[dict[str, Any]] = [
        {
            "plan": plan.digest,
            "path": str(plan.path),
            "recipe": plan.recipe.name,
            "budget": plan.budget.label,
            "bits_mean": plan.mean_bits,
            "predicted": dict(plan.predicted),
            "forecast": kl_forecast(plan),
        }
        | plan.layout.summary(tokens)
        for plan in plans
    ]
    if json:
        print_json(facts)
        return
    rows = [
        [f["path"], f"{f['bits_mean']:.3f}", f"{f['bits_packed']:.3f}", f"{f['ratio']:.2f}", f["plan"][:12]]
        for f in facts
    ]
    print_table(f"plans, ratio at {tokens:,} tokens", ["plan", "bits", "packed bits", "ratio", "digest"], rows)


def _of_unmet(unmet: list[Unmet], made: int) -> Exception:
    """The error for budgets that cannot be met: of one alone its own."""
    from aatc_cli.errors import AatcError

    if len(unmet) == 1 and not made:
        return unmet[0].error
    told = "; ".join(f"{each.name}: {each.error.message}" for each in unmet)
    return AatcError(f"{len(unmet)} of {made + len(unmet)} plans cannot be made: {told}", unmet[0].error.hint)


def check_plans(paths: list[str], transform: Path | None, json: bool) -> None:
    """Derive every plan again and say which are identical; exit code 1 unless all of them are.

    Of one plan alone a damaged one is an error like any other; of several it is one line, and the others are checked.
    """
    from dataclasses import asdict

    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan, verify
    from aatc_cli.console import print_json, print_table, working
    from aatc_cli.errors import AatcError
    from aatc_cli.stages.allocate import check

    found: list[dict[str, Any]] = []
    for path in paths:
        entry: dict[str, Any] = {"plan": None, "path": str(path), "identical": False, "differences": []}
        try:
            plan = Plan.open(find_plan(path))
            with working(f"deriving {plan.name}"):
                differences = check(plan, transform)
            # the matrices too, which no width depends on: the plan is used with them
            verify(plan.transform(transform))
        except AatcError as error:
            if len(paths) == 1:
                raise
            found.append(entry | {"error": error.message})
            continue
        found.append(
            entry
            | {
                "plan": plan.digest,
                "identical": not differences,
                "differences": [asdict(difference) for difference in differences],
            }
        )
    if json:
        print_json(found)
    for entry in [] if json else found:
        differences = entry["differences"]
        if differences:
            rows = [
                [f"{d['layer']} {d['side']}", *(str(d[k]) for k in ("channel", "planned", "derived"))]
                for d in differences[:50]
            ]
            title = f"{entry['path']}: {len(differences)} channels differ"
            print_table(title, ["site", "channel", "planned", "derived"], rows)
        else:
            typer.echo(f"{entry['path']}: " + entry.get("error", f"identical ({str(entry['plan'])[:12]})"))
    if not all(entry["identical"] for entry in found):
        raise typer.Exit(1)
