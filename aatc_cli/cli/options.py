"""Options that several commands share, and what their values stand for. Nothing heavy is imported at the top."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.config import Budget
    from aatc_cli.evals.subjects import Subject
    from aatc_cli.models.loading import ModelSource
    from aatc_cli.profiles import ModelProfile

PLAN_HELP = "Plan directory, exported folder, or hub:owner/name@COMMIT."
RunOption = Annotated[Path, typer.Option("--run", envvar="AATC_RUN", help="Run directory.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", envvar="AATC_MODEL", help="Hub id (owner/name), folder or .gguf file.")
]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="Model profile: a name or a .toml path.")]
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
RecipeOption = Annotated[list[str] | None, typer.Option("--recipe", help="Recipe name or .toml path; repeatable.")]
BudgetOption = Annotated[list[float] | None, typer.Option("--budget", help="Bits per channel; repeatable.")]
RatioOption = Annotated[float | None, typer.Option("--ratio", help="Compression ratio to reach at --context.")]
BytesOption = Annotated[str | None, typer.Option("--bytes", help="Cache size to stay within at --context: 184MB.")]


def find_source(model: str | None, profile: str | None) -> tuple[ModelSource, ModelProfile | None]:
    """The model named by --model or, without it, by the profile; raises `UsageError` when neither names one."""
    from aatc_cli.errors import UsageError
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import load_model_profile

    found = load_model_profile(profile) if profile is not None else None
    if model is None and found is None:
        raise UsageError("no model was named", "give --model (hub id, folder or .gguf) or --profile, or set AATC_MODEL")
    return find_model(model if model is not None else found.model if found else ""), found


def budgets_of(budget: list[float] | None, ratio: float | None, size: str | None, context: int | None) -> list[Budget]:
    """Budgets of the options --budget (repeatable), --ratio and --bytes; raises `UsageError`."""
    from aatc_cli.config import make_budget

    if budget and ratio is None and size is None:
        return [make_budget(bits=value) for value in budget]
    return [make_budget(bits=budget[0] if budget else None, ratio=ratio, size=size, context=context)]


def subjects_of(
    run: Run, recipe: list[str] | None, budget: list[float] | None, plan: list[Path] | None
) -> list[Subject]:
    """Plans named by --plan, or by every combination of --recipe and --budget; raises `UsageError`."""
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.config import make_budget
    from aatc_cli.errors import UsageError
    from aatc_cli.evals.subjects import Subject
    from aatc_cli.profiles import load_recipe

    subjects = []
    for path in plan or []:
        opened = Plan.open(find_plan(path))
        subjects.append(Subject(opened.recipe, opened))
    for name in recipe or ([] if plan else ["paper"]):
        loaded = load_recipe(name)
        if loaded.choices.allocator.nothing:
            subjects.append(Subject(loaded, None))
            continue
        if not budget:
            raise UsageError(f"recipe {name} needs a budget", "add --budget 2.0, or name plans by --plan")
        for value in budget:
            opened = Plan.open(run.plan(loaded.name, make_budget(bits=value)))
            subjects.append(Subject(opened.recipe, opened))
    return subjects
