"""Options that several commands share. Nothing heavy is imported here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def a_path(text: str | Path) -> Path:
    """The path that an option names; raises for an empty one, which would be the folder one happens to be in."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty; give a path")
    return Path(text)


def completed(kind: Literal["models", "recipes", "studies"]) -> Callable[[str], list[str]]:
    """What a shell completes a name of one kind of packaged profiles to."""

    def complete(incomplete: str) -> list[str]:
        from aatc_cli.profiles import available

        return [name for name in available(kind) if name.startswith(incomplete)]

    return complete


RunOption = Annotated[
    Path, typer.Option("--run", envvar="AATC_RUN", parser=a_path, metavar="PATH", help="Run directory.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", envvar="AATC_MODEL", help="Hub id (owner/name), folder or .gguf file.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", help="Model profile: a name or a .toml path.", autocompletion=completed("models")),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be read and written, bytes and time; write nothing.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
DeviceMapOption = Annotated[
    Literal["none", "auto"],
    typer.Option("--device-map", help="auto: accelerate spreads the model over all GPUs, main memory and disk."),
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Model dtype; auto is float32 on a CPU and bfloat16 on a GPU."),
]
RecipeOption = Annotated[
    list[str] | None,
    typer.Option("--recipe", help="Recipe name or .toml path; several allowed.", autocompletion=completed("recipes")),
]
BudgetOption = Annotated[
    list[float] | None, typer.Option("--budget", help="Bits per channel; several allowed: --budget 2,3.")
]
PLAN_HELP = "Plan directory, exported folder, or hub:owner/name@COMMIT."
PlanOption = Annotated[
    list[str] | None, typer.Option("--plan", help=f"{PLAN_HELP} Several allowed: run/plans/*. Default: all of the run.")
]
CacheOption = Annotated[
    Literal["auto", "packed", "fused", "simulated"],
    typer.Option("--cache", help="How the cache is held; auto is packed where the plan can be."),
]
RatioOption = Annotated[float | None, typer.Option("--ratio", help="Compression ratio to reach at --context.")]
BytesOption = Annotated[str | None, typer.Option("--bytes", help="Cache size to stay within at --context: 184MB.")]

# parameters of a command by the group of options that it reads (of a task: `evals.TASKS`): name, annotation, default
GROUPS: dict[str, tuple[tuple[str, Any, Any], ...]] = {
    "model": (("profile", ProfileOption, None), ("model", ModelOption, None)),
    "profile": (("profile", ProfileOption, None),),
    "plans": (("recipe", RecipeOption, None), ("budget", BudgetOption, None), ("plan", PlanOption, None)),
    "budgets": (("recipe", RecipeOption, None), ("budget", BudgetOption, None)),
    "cache": (("cache", CacheOption, "auto"),),
    "batch": (("batch", Annotated[int, typer.Option("--batch", min=1, help="Windows or prompts at once.")], 1),),
    "device": (("device", DeviceOption, "cpu"), ("dtype", DtypeOption, "auto")),
    "device-map": (("device_map", DeviceMapOption, "none"),),
    "dry-run": (("dry_run", DryRunOption, False),),
    "profile-alone": (),
}
# those of commands that are no task beside the same groups
_OWN: dict[str, tuple[str, Any, Any]] = {
    "run": ("run", RunOption, Path("run")),
    "force": ("force", ForceOption, False),
    "json": ("json", JsonOption, False),
    "device alone": ("device", DeviceOption, "cpu"),
    "ratio": ("ratio", RatioOption, None),
    "bytes": ("bytes", BytesOption, None),
}


def shared(*names: str) -> list[inspect.Parameter]:
    """Parameters of the shared options of these groups."""
    entries = [entry for name in names for entry in ([_OWN[name]] if name in _OWN else GROUPS[name])]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind, default=default, annotation=made) for name, made, default in entries]
