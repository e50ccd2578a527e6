"""The command inspect: what is in an artifact, a run, a model or a profile."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aatc_cli.cli.making import given_settings, parameter, settings_parameters
from aatc_cli.cli.options import a_path, shared

if TYPE_CHECKING:
    from aatc_cli.cli.asked import InspectAsked
    from aatc_cli.stages.inspecting.facts import Inspection

_Path = Annotated[
    Path | None, typer.Argument(parser=a_path, metavar="PATH", help="Artifact, evaluation file or run directory.")
]
_Other = Annotated[
    Path | None, typer.Argument(parser=a_path, metavar="OTHER", help="One more of that kind: say in what they differ.")
]


def inspect_parameters() -> list[Parameter]:
    """Parameters of the command."""
    from aatc_cli.cli.asked import InspectAsked

    return [
        parameter("path", _Path, None),
        parameter("other", _Other, None),
        *shared("run"),
        *settings_parameters(InspectAsked, "plan", "recipe", "budget"),
        *shared("ratio", "bytes"),
        *settings_parameters(InspectAsked, "context"),
        *shared("profile"),
        *settings_parameters(InspectAsked, "model"),
        *shared("json"),
    ]


def inspect(values: dict[str, Any]) -> None:
    """Show what is in an artifact, a run, a model or a profile at a budget, or in what two artifacts differ.

    Examples: aatc inspect; aatc inspect --budget 2; aatc inspect --model MODEL;
    aatc inspect run/plans/paper-2 run/plans/paper-3;
    aatc inspect --profile llama-3.1-8b-instruct --budget 2.5 --context 8192 --json
    """
    from aatc_cli.cli.asked import InspectAsked
    from aatc_cli.cli.inspections import print_inspection

    asked, path, other = given_settings(InspectAsked, values), values["path"], values["other"]
    asked.check(path, other)
    if other is not None and path is not None:
        from aatc_cli.stages.inspecting.difference import inspect_difference

        print_inspection(inspect_difference(path, other), values["json"])
        return
    of_model = asked.profile is not None or asked.model is not None
    found = _of_model(asked) if of_model else _of_artifact(asked, path or values["run"])
    print_inspection(found, values["json"])


def _of_model(asked: InspectAsked) -> Inspection:
    """Of a model or a profile, before anything has run."""
    from aatc_cli.profiles import load_model_profile, load_recipe

    profile = load_model_profile(asked.profile) if asked.profile is not None else None
    if asked.model is None and profile is not None:
        from aatc_cli.stages.inspecting.profile import inspect_profile

        return inspect_profile(profile, load_recipe(asked.recipe or "paper"), asked.wanted, asked.context)
    from aatc_cli.models.loading import find_model
    from aatc_cli.stages.inspecting.model import inspect_model

    return inspect_model(find_model(asked.model or ""), profile)


def _of_artifact(asked: InspectAsked, place: Path) -> Inspection:
    """Of a plan that is named, of the plan of a run at a budget, or of what lies at ``place``."""
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.stages.inspect import inspect_budget, inspect_path
    from aatc_cli.stages.inspecting.plan import inspect_plan

    if asked.plan is not None:
        return inspect_plan(Plan.open(find_plan(asked.plan)), asked.context)
    if asked.budgeted:
        return inspect_budget(place, asked.recipe or "paper", asked.wanted, asked.context)
    return inspect_path(place, asked.context)
