"""The command eval: a sub-command for every task, made when it is asked for; without a task it is kl."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from aatc_cli.cli.making import command_of, given_settings, parameter, settings_parameters
from aatc_cli.cli.options import shared
from aatc_cli.evals import TASKS, Task

if TYPE_CHECKING:
    from aatc_cli.evals.call import Call

_DEFAULT = "kl"
# what the options of this command were called before they became words
_MOVED = {"--task": "aatc eval {}", "--study": "aatc study {}"}


class Tasks(TyperGroup):
    """The tasks of `evals.TASKS` as commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the tasks, in their order."""
        return [task.name for task in TASKS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a task; None for a name that is no task."""
        return next((_command(task) for task in TASKS if task.name == cmd_name), None)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a task in front, take all for options of kl; raises `UsageError` for the form of old."""
        from aatc_cli.errors import UsageError

        for place, arg in enumerate(args):
            option, equals, value = arg.partition("=")
            if option in _MOVED:
                word = value if equals else args[place + 1] if place + 1 < len(args) else "NAME"
                raise UsageError(f"{option} is a word of the command now", f"write {_MOVED[option].format(word)}")
        # a shell that completes the first word asks with none: for the tasks
        nothing = not args and not ctx.resilient_parsing
        if nothing or (args and args[0].startswith("-") and args[0] not in ("--help", "-h")):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


tasks = typer.Typer(
    cls=Tasks,
    help="Measure the model with its compressed cache (Evaluations).\n\n"
    "Without a task it is kl; without --plan, --recipe and --budget it is of all plans of the run. A result that is "
    "there of the same plan, model, text and settings is not measured again.",
)


def parameters_of(task: Task) -> list[inspect.Parameter]:
    """Parameters of a task's command: those that it shares with others, and one for every field of its settings."""
    context = parameter("context_", typer.Context, inspect.Parameter.empty)
    own = settings_parameters(task.part("settings", "Settings"))
    return [context, *shared("run", *task.reads), *own, *shared("force", "json")]


def _command(task: Task) -> Any:
    return command_of(task.name, task.summary, parameters_of(task), partial(_run, task))


def _run(task: Task, values: dict[str, Any]) -> None:
    from aatc_cli.cli.printing import print_results

    settings = given_settings(task.part("settings", "Settings"), values)
    call = _call(task, values)
    if values.get("dry_run"):
        from aatc_cli.cli.inspections import print_inspection
        from aatc_cli.stages.inspecting.forecast_model import forecast_eval

        print_inspection(forecast_eval(call, settings).inspection(), values["json"])
        return
    results = task.call()(task, call, settings)
    print_results(task, results, values["json"], call.run.evals)


def _call(task: Task, values: dict[str, Any]) -> Call:
    """What the shared options come to; raises `UsageError` for values that do not fit together."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.choosing import find_source, subjects_of
    from aatc_cli.evals.call import Call
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.profiles import load_model_profile

    options = EvalOptions(
        device=values["device"],
        dtype=values["dtype"],
        force=values["force"],
        spread=values.get("device_map") == "auto",
        batch=values["batch"] if "batch" in task.reads else 1,
        cache=values.get("cache", "auto"),
    )
    run, recipes, budgets = Run(values["run"]), values.get("recipe"), values.get("budget")
    named: dict[str, Any] = {"recipes": tuple(recipes or ()), "budgets": tuple(budgets or ())}
    model, profile = values.get("model"), values.get("profile")
    source_of_model = values["context_"].get_parameter_source("model")
    by_environment = source_of_model is not None and source_of_model.name == "ENVIRONMENT"
    # a profile that is named beats a model that only the environment names
    alone = "profile-alone" in task.reads and profile is not None and (model is None or by_environment)
    if alone or "model" not in task.reads:
        _refuse_plans(values.get("plan"))
        return Call(run, options, profile=load_model_profile(profile) if profile is not None else None, **named)
    source, loaded = find_source(model, profile)
    subjects = subjects_of(run, recipes, budgets, values.get("plan")) if "plans" in task.reads else []
    return Call(run, options, source, loaded, subjects, **named)


def _refuse_plans(plans: list[str] | None) -> None:
    from aatc_cli.errors import UsageError

    if plans:
        raise UsageError("a profile alone is measured without plans", "leave out --plan, or name the model by --model")
