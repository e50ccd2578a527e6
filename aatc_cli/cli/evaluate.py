"""The eval command: one task per call, each in a stage of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from aatc_cli.cli.benchmarks import run_harness, run_ruler
from aatc_cli.cli.measures import (
    only_batch,
    run_memory,
    run_memory_of_geometry,
    run_speed,
    run_speed_of_geometry,
    run_speed_of_stages,
)
from aatc_cli.cli.options import (
    PLAN_HELP,
    BudgetOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RecipeOption,
    RunOption,
    find_source,
    subjects_of,
)
from aatc_cli.cli.stability import run_stability
from aatc_cli.cli.study import only_study, run_study


def evaluate(
    run: RunOption = Path("run"),
    task: Annotated[
        Literal[
            "kl",
            "perplexity",
            "distortion",
            "stability",
            "memory",
            "speed",
            "ruler",
            "gsm8k",
            "mmlu-pro",
            "math-500",
            "longbench",
        ],
        typer.Option("--task", help="What to measure; the last five are benchmarks, by generation."),
    ] = "kl",
    profile: ProfileOption = None,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    budget: BudgetOption = None,
    plan: Annotated[list[Path] | None, typer.Option("--plan", help=f"{PLAN_HELP} Repeatable.")] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", help="Run a study instead of one task: a name (main, headline, ...) or a .toml path."),
    ] = None,
    stats: Annotated[
        list[Path] | None, typer.Option("--stats", help="Stats to calibrate on, two or more; repeatable (stability).")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="Held-out text, as for collect; repeatable, one file each. RULER: its essays."),
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens per window. Default: 1024, or the study's.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help="Windows per text (default 4) or samples per subtask (20); 0 is all."),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option("--first", min=0, help="First scored position. Default: 512 (kl, distortion), 0 (perplexity)."),
    ] = None,
    queries: Annotated[int, typer.Option("--queries", min=1, help="Query positions per window (distortion).")] = 8,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", min=1, help="Tokens in the cache; repeatable (ruler, memory, speed)."),
    ] = None,
    subtask: Annotated[
        list[str] | None, typer.Option("--subtask", help="Part of a benchmark, globs allowed; repeatable.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Folder of a benchmark's files, or hub. RULER's are of qa_1 and qa_2.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template (benchmarks).")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the prompts (ruler).")] = 0,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Sequences at once; repeatable for memory and speed. Default: 1."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Times each size is measured (speed).")] = 5,
    whole_model: Annotated[
        bool, typer.Option("--whole-model", help="Time whole decode steps too, random weights (speed of a profile).")
    ] = False,
    offline_stages: Annotated[
        bool, typer.Option("--offline-stages", help="Time collect and whiten instead (speed of a profile).")
    ] = False,
    groups: Annotated[
        str, typer.Option("--groups", help="Head groups: heads (fused kernels), all, or a number (speed of a profile).")
    ] = "heads",
    device: DeviceOption = "cpu",
    device_map: DeviceMapOption = "none",
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Measure the model with its compressed cache on text that calibration did not see (Evaluations).

    Plans are named by --plan, or by every combination of --recipe and --budget; --recipe fp16 is the reference.
    With --study the study names methods and tasks: --recipe keeps only some of its methods, --limit, --length and
    --context replace those of its tasks.
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.printing import print_evaluations
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.stages.evaluate import EvalSettings
    from aatc_cli.stages.evaluate import evaluate as stage

    if device_map == "auto" and task not in ("kl", "perplexity"):
        from aatc_cli.errors import UsageError

        problem = f"--task {task} needs the model on one device, as the packed cache does"
        raise UsageError(problem, "leave out --device-map, or use --task kl or perplexity")
    if task == "memory" and profile is not None and model is None:
        run_memory_of_geometry(
            Run(run), profile, recipe, budget, EvalOptions(device, dtype, force), json, contexts=context, batches=batch
        )
        return
    if task == "speed" and profile is not None and model is None and offline_stages:
        run_speed_of_stages(
            Run(run), profile, EvalOptions(device, dtype, force), json, contexts=context, batches=batch, repeats=repeats
        )
        return
    if task == "speed" and profile is not None and model is None:
        run_speed_of_geometry(
            Run(run),
            profile,
            budget,
            EvalOptions(device, dtype, force),
            json,
            contexts=context,
            batches=batch,
            repeats=repeats,
            whole=whole_model,
            groups=groups,
        )
        return
    source, _ = find_source(model, profile)
    texts = text or ["builtin:python-docs-test"]
    options = EvalOptions(device, dtype, force, spread=device_map == "auto")
    if study is not None:
        only_study(budget, plan, subtask)
        run_study(
            Run(run),
            source,
            study,
            options,
            json,
            texts=texts,
            recipes=recipe,
            limit=limit,
            length=length,
            contexts=context,
            data=data,
            batch=only_batch(batch),
        )
        return
    length = length or 1024
    if task == "stability":
        chosen = EvalSettings("kl", length, 4 if limit is None else limit or None, first)
        run_stability(Run(run), source, recipe, budget, stats, texts, chosen, options, json)
        return
    subjects = subjects_of(Run(run), recipe, budget, plan)
    if task == "ruler":
        run_ruler(
            Run(run),
            source,
            subjects,
            options,
            only_batch(batch),
            json,
            contexts=context,
            limit=limit,
            subtasks=subtask,
            seed=seed,
            chat=chat,
            data=data,
            texts=texts,
        )
        return
    if task == "gsm8k" or task == "mmlu-pro" or task == "math-500" or task == "longbench":
        run_harness(
            Run(run),
            source,
            subjects,
            options,
            only_batch(batch),
            json,
            benchmark=task,
            limit=limit,
            subtasks=subtask,
            chat=chat,
            data=data,
        )
        return
    if task == "memory":
        run_memory(Run(run), source, subjects, options, json, contexts=context, batches=batch)
        return
    if task == "speed":
        run_speed(Run(run), source, subjects, options, json, contexts=context, batches=batch, repeats=repeats)
        return
    settings = EvalSettings(task, length, 4 if limit is None else limit or None, first, queries)
    results = stage(Run(run), source, subjects, texts, settings, options)
    print_evaluations(results, json)
