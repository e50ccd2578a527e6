"""The commands that only read: inspect and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aatc_cli.cli.options import BytesOption, JsonOption, ProfileOption, RatioOption, RunOption


def inspect(
    path: Annotated[Path | None, typer.Argument(help="Artifact, evaluation file or run directory.")] = None,
    run: RunOption = Path("run"),
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan directory.")] = None,
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
    """Show what is in an artifact, a run, a model or a profile at a budget.

    Examples: aatc inspect; aatc inspect --budget 2; aatc inspect --model MODEL;
    aatc inspect --profile llama-3.1-8b-instruct --budget 2.5 --context 8192 --json
    """
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.printing import print_inspection
    from aatc_cli.config import make_budget
    from aatc_cli.stages.inspect import inspect_path
    from aatc_cli.stages.inspecting.plan import inspect_plan

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
        print_inspection(inspect_plan(Plan.open(plan), context), json)
    elif budget is not None or ratio is not None or size is not None:
        wanted = make_budget(bits=budget, ratio=ratio, size=size, context=context)
        print_inspection(inspect_plan(Plan.open(Run(path or run).plan(recipe or "paper", wanted)), context), json)
    else:
        print_inspection(inspect_path(path or run, context), json)


def report(
    run: RunOption = Path("run"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the report.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the run's report: Markdown, CSV, JSON and one self-contained HTML file with plots."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.console import print_json, say
    from aatc_cli.stages.report import make_report

    files = make_report(Run(run), title=title)
    if json:
        places = {"html": files.html, "markdown": files.markdown, "csv": files.csv, "json": files.json}
        print_json({kind: str(path) for kind, path in places.items()})
        return
    typer.echo(files.markdown.read_text(encoding="utf-8"))
    say(f"report: open {files.html}")
