"""The memory and speed tasks of the eval command: options to settings, stage, print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.evals.subjects import EvalOptions, Subject
    from aatc_cli.models.loading import ModelSource


def run_memory(
    run: Run,
    source: ModelSource,
    subjects: list[Subject],
    options: EvalOptions,
    json: bool,
    *,
    contexts: list[int] | None,
    batches: list[int] | None,
) -> None:
    """``--task memory`` with a model: bytes of every plan's live cache at every --context and --batch."""
    from aatc_cli.cli.printing import print_memory
    from aatc_cli.stages.memory import MemorySettings, measure_memory

    settings = MemorySettings(tuple(contexts or [2048]), tuple(batches or [1]))
    print_memory(measure_memory(run, source, subjects, settings, options), json)


def run_memory_of_geometry(
    run: Run,
    profile: str,
    recipes: list[str] | None,
    budgets: list[float] | None,
    options: EvalOptions,
    json: bool,
    *,
    contexts: list[int] | None,
    batches: list[int] | None,
) -> None:
    """``--task memory`` with a profile and no model: random vectors; raises `UsageError` without --budget."""
    from aatc_cli.cli.printing import print_memory
    from aatc_cli.config import make_budget
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_model_profile, load_recipe
    from aatc_cli.stages.memory import MemorySettings, synthetic_memory

    if not budgets:
        raise UsageError("memory of a profile needs a budget", "add --budget 2.5, or measure a plan with --model")
    settings = MemorySettings(tuple(contexts or [2048]), tuple(batches or [1]))
    found = synthetic_memory(
        run,
        load_model_profile(profile),
        [load_recipe(name) for name in recipes or ["paper"]],
        [make_budget(bits=value) for value in budgets],
        settings,
        options,
    )
    print_memory(found, json)


def run_speed(
    run: Run,
    source: ModelSource,
    subjects: list[Subject],
    options: EvalOptions,
    json: bool,
    *,
    contexts: list[int] | None,
    batches: list[int] | None,
    repeats: int,
) -> None:
    """``--task speed``: prefill and decode of every plan's cache against the model's own."""
    from aatc_cli.cli.printing import print_speed
    from aatc_cli.stages.speed import SpeedSettings, measure_speed

    settings = SpeedSettings(tuple(contexts or [2048]), tuple(batches or [1]), repeats)
    print_speed(measure_speed(run, source, subjects, settings, options), json)


def run_speed_of_geometry(
    run: Run,
    profile: str,
    budgets: list[float] | None,
    options: EvalOptions,
    json: bool,
    *,
    contexts: list[int] | None,
    batches: list[int] | None,
    repeats: int,
    whole: bool,
    groups: str,
) -> None:
    """``--task speed`` with a profile and no model: the fused kernels, or with --groups the packed cache.

    Raises `UsageError` without one --budget, or for head groups that the profile cannot have.
    """
    from aatc_cli.cli.printing import print_speed
    from aatc_cli.errors import UsageError
    from aatc_cli.evals.bench.geometry import measure_geometry
    from aatc_cli.profiles import load_model_profile

    if budgets is None or len(budgets) != 1:
        raise UsageError("speed of a profile needs one budget", "add --budget 2, or measure a plan with --model")
    sizes = [(context, batch) for context in contexts or [8192] for batch in batches or [1]]
    chosen = load_model_profile(profile)
    count = head_groups_of(groups, chosen.geometry.kv_heads)
    if whole and count is not None:
        raise UsageError("whole decode steps are timed with the fused cache", "leave out --groups or --whole-model")
    found = measure_geometry(run, chosen, budgets[0], sizes, repeats, options, whole=whole, groups=count)
    print_speed([found], json)


def run_speed_of_stages(
    run: Run,
    profile: str,
    options: EvalOptions,
    json: bool,
    *,
    contexts: list[int] | None,
    batches: list[int] | None,
    repeats: int,
) -> None:
    """``--task speed --offline-stages``: collect and whiten of a profile's geometry."""
    from aatc_cli.cli.printing import print_speed
    from aatc_cli.profiles import load_model_profile
    from aatc_cli.studies.offline_speed import measure_offline

    sizes = [(context, batch) for context in contexts or [2048] for batch in batches or [4]]
    print_speed([measure_offline(run, load_model_profile(profile), sizes, repeats, options)], json)


def head_groups_of(groups: str, kv_heads: int) -> int | None:
    """--groups as a number of head groups: None for heads (fused kernels), 1 for all; raises `UsageError`."""
    from aatc_cli.errors import UsageError

    if groups == "heads":
        return None
    count = 1 if groups == "all" else int(groups) if groups.isascii() and groups.isdigit() else 0
    if not count or kv_heads % count:
        raise UsageError(
            f"{kv_heads} kv heads do not make {groups} head groups", "give --groups heads, all, or a divisor"
        )
    return count


def only_batch(batches: list[int] | None) -> int:
    """The one --batch of a task that takes one, or 1; raises `UsageError` for several."""
    from aatc_cli.errors import UsageError

    if batches and len(batches) > 1:
        raise UsageError("this task takes one --batch", "give --batch once")
    return batches[0] if batches else 1
