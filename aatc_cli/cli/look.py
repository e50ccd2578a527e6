"""The commands that only read: inspect and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aatc_cli.cli.options import PLAN_HELP, BytesOption, JsonOption, ProfileOption, RatioOption, RunOption, a_path


def inspect(
    path: Annotated[
        Path | None, typer.Argument(parser=a_path, metavar="PATH", help="Artifact, evaluation file or run directory.")
    ] = None,
    other: Annotated[
        Path | None,
        typer.Argument(parser=a_path, metavar="OTHER", help="One more of that kind: say in what they differ."),
    ] = None,
    run: RunOption = Path("run"),
    plan: Annotated[str | None, typer.Option("--plan", help=PLAN_HELP)] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe. Default: paper.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Bits per channel.")] = None,
    ratio: RatioOption = None,
    size: BytesOption = None,
    context: Annotated[
        int, typer.Option("--context", min=1, max=2**40, help="Tokens at which bytes are counted.")
    ] = 8192,
    profile: ProfileOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Look at a model before anything has run.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what is in an artifact, a run, a model or a profile at a budget, or in what two artifacts differ.

    Examples: aatc inspect; aatc inspect --budget 2; aatc inspect --model MODEL;
    aatc inspect run/plans/paper-2 run/plans/paper-3;
    aatc inspect --profile llama-3.1-8b-instruct --budget 2.5 --context 8192 --json
    """
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.cli.inspections import print_inspection
    from aatc_cli.config import make_budget
    from aatc_cli.stages.inspect import inspect_path
    from aatc_cli.stages.inspecting.plan import inspect_plan

    _one_thing(
        path, other, plan, profile, model, recipe, budgeted=any(each is not None for each in (budget, ratio, size))
    )
    if other is not None and path is not None:
        from aatc_cli.stages.inspecting.difference import inspect_difference

        print_inspection(inspect_difference(path, other), json)
        return
    found = None
    if profile is not None:
        from aatc_cli.profiles import load_model_profile

        found = load_model_profile(profile)
    if model is not None:
        from aatc_cli.models.loading import find_model
        from aatc_cli.stages.inspecting.model import inspect_model

        print_inspection(inspect_model(find_model(model), found), json)
    elif found is not None:
        from aatc_cli.profiles import load_recipe
        from aatc_cli.stages.inspecting.profile import inspect_profile

        wanted = make_budget(bits=budget, ratio=ratio, size=size, context=context)
        print_inspection(inspect_profile(found, load_recipe(recipe or "paper"), wanted, context), json)
    elif plan is not None:
        print_inspection(inspect_plan(Plan.open(find_plan(plan)), context), json)
    elif budget is not None or ratio is not None or size is not None:
        wanted = make_budget(bits=budget, ratio=ratio, size=size, context=context)
        print_inspection(inspect_plan(Plan.open(Run(path or run).plan(recipe or "paper", wanted)), context), json)
    else:
        print_inspection(inspect_path(path or run, context), json)


def _one_thing(
    path: Path | None,
    other: Path | None,
    plan: str | None,
    profile: str | None,
    model: str | None,
    recipe: str | None,
    *,
    budgeted: bool,
) -> None:
    """Raise `UsageError` where two things are named to be looked at, one of which would be passed over."""
    from aatc_cli.errors import UsageError

    named = [
        name for name, value in (("--plan", plan), ("--profile", profile), ("--model", model)) if value is not None
    ]
    if path is not None:
        named.insert(0, str(path))
    if other is not None and (len(named) > 1 or budgeted):
        raise UsageError("two artifacts are compared as they are", "leave out the options")
    # a profile goes with the model that it is of
    if len(named) > 1 and set(named) != {"--profile", "--model"}:
        raise UsageError(f"{' and '.join(named)} are two things to look at", "name one")
    if recipe is not None and profile is None and not budgeted:
        raise UsageError("--recipe is read with --budget, --ratio or --bytes", "add one of them, or leave out --recipe")
    if budgeted and (plan is not None or model is not None):
        raise UsageError(f"a budget is no part of {named[0]}", "leave it out, or name a profile or a run")


def report(
    run: RunOption = Path("run"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the report.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the run's report: Markdown, CSV, JSON and one self-contained HTML file with plots; say where they are."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.console import print_json, print_table
    from aatc_cli.stages.report import make_report

    files = make_report(Run(run), title=title)
    places = {"html": files.html, "markdown": files.markdown, "csv": files.csv, "json": files.json}
    if json:
        print_json({kind: str(path) for kind, path in places.items()})
        return
    print_table(f"report of {run}", ["form", "file"], [[kind, str(path)] for kind, path in places.items()])
