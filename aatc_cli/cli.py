"""The command line: parse, validate, call one stage, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aatc_cli import __version__

if TYPE_CHECKING:
    from aatc_cli.models.loading import ModelSource
    from aatc_cli.profiles import ModelProfile, TextMixture
    from aatc_cli.stages.evaluate import Subject
    from aatc_cli.stages.files import Run

app = typer.Typer(
    name="aatc",
    help="Compress the key-value cache of a language model by attention-aware transform coding.\n\n"
    "Stages: collect -> whiten -> allocate -> inspect -> eval -> report. Each reads artifacts from a run directory "
    "(--run, default $AATC_RUN or ./run) and writes one. Data goes to stdout, progress and log to stderr.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunOption = Annotated[Path, typer.Option("--run", envvar="AATC_RUN", help="Run directory.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", envvar="AATC_MODEL", help="Hub id (owner/name), folder or .gguf file.")
]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="Model profile: a name or a .toml path.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Model dtype; auto is float32 on a CPU and bfloat16 on a GPU."),
]
RecipeOption = Annotated[list[str] | None, typer.Option("--recipe", help="Recipe name or .toml path; repeatable.")]
BudgetOption = Annotated[list[float] | None, typer.Option("--budget", help="Bits per channel; repeatable.")]
RatioOption = Annotated[float | None, typer.Option("--ratio", help="Compression ratio to reach at --context.")]
BytesOption = Annotated[str | None, typer.Option("--bytes", help="Cache size to stay within at --context: 184MB.")]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Answer --version, and no command with the help; everything else is a command."""
    if version:
        typer.echo(f"aatc {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def collect(
    run: RunOption = Path("run"),
    profile: ProfileOption = None,
    model: ModelOption = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Calibration text, repeatable, each with an optional @WEIGHT: builtin:python-docs, FILE, "
            "FILE.jsonl:FIELD, hf:DATASET:CONFIG:SPLIT:FIELD. Default: the profile's mixture.",
        ),
    ] = None,
    calibration: Annotated[
        Literal["rates", "transform"], typer.Option("--calibration", help="Which of the profile's mixtures to use.")
    ] = "rates",
    name: Annotated[str | None, typer.Option("--name", help="Name of the Stats in the run.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Windows over all texts.")] = None,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Tokens per window.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of the draw of windows and rows.")
    ] = 0,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows kept per layer for percentiles.")] = 4096,
    skip_first: Annotated[
        int, typer.Option("--skip-first", min=0, help="Positions per window that enter no statistic (sinks).")
    ] = 4,
    fisher: Annotated[
        int,
        typer.Option("--fisher", min=0, help="Windows whose loss gradients are collected too, for loss-aware recipes."),
    ] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows per forward pass.")] = 1,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", min=0, help="Seconds between checkpoints.")
    ] = 60.0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Run the model over calibration text and keep its statistics (Stats).

    Interrupted, it continues from its last checkpoint when started again with the same options, and ends with the
    same result. Example: aatc collect --profile smollm2-135m-instruct --model .models/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from aatc_cli.printing import print_artifact
    from aatc_cli.stages.collect import CollectOptions
    from aatc_cli.stages.collect import collect as stage
    from aatc_cli.stages.collect_job import CollectSettings
    from aatc_cli.stages.files import Run

    source, found = _model(model, profile)
    mixture = _mixture(found, calibration, text, samples, length)
    settings = CollectSettings(
        samples=mixture.samples, length=mixture.length, seed=seed, rows=rows, skip_first=skip_first, fisher=fisher,
        head_groups=found.head_groups if found else 1,
    )  # fmt: skip
    options = CollectOptions(device, dtype, batch, checkpoint_seconds, force)
    target = name if name is not None else "stats" if calibration == "rates" else "stats-transform"
    manifest = stage(Run(run), target, source, mixture, settings, options, found)
    print_artifact(run / target, manifest.digest, json)


@app.command()
def whiten(
    run: RunOption = Path("run"),
    transform: Annotated[
        Literal["whiten", "metric", "identity"],
        typer.Option("--transform", help="Kind of transform; metric needs Stats collected with --fisher."),
    ] = "whiten",
    transform_stats: Annotated[
        Path | None,
        typer.Option("--transform-stats", help="Stats for the matrices. Default: stats-transform, else stats."),
    ] = None,
    rate_stats: Annotated[
        Path | None, typer.Option("--rate-stats", help="Stats for variances, weights and scales. Default: stats.")
    ] = None,
    head_groups: Annotated[
        int | None, typer.Option("--head-groups", min=1, help="Head groups per layer. Default: the profile's.")
    ] = None,
    percentile: Annotated[float, typer.Option("--percentile", help="Percentile of |h| used as channel scale.")] = 99.0,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Turn Stats into encode and decode matrices, variances, weights and scales (Transform). No model is needed."""
    from aatc_cli.errors import UsageError

    if not 0 < percentile <= 100:
        raise UsageError(f"--percentile must lie in (0, 100], got {percentile:g}", "the paper uses 99")
    from aatc_cli.printing import print_artifact
    from aatc_cli.stages.files import Run
    from aatc_cli.stages.whiten import whiten as stage

    place = Run(run)
    rates = rate_stats or place.stats()
    basis = transform_stats or (place.stats("stats-transform") if place.stats("stats-transform").exists() else rates)
    manifest = stage(
        place, transform_stats=basis, rate_stats=rates, transform=transform, head_groups=head_groups,
        percentile=percentile, force=force,
    )  # fmt: skip
    print_artifact(place.transform(transform), manifest.digest, json)


@app.command()
def allocate(
    run: RunOption = Path("run"),
    recipe: RecipeOption = None,
    budget: BudgetOption = None,
    ratio: RatioOption = None,
    size: BytesOption = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Tokens for --ratio and --bytes.")] = None,
    transform: Annotated[Path | None, typer.Option("--transform", help="Transform. Default: the run's.")] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Re-derive this plan; exit 0 if identical, 1 with the difference otherwise."),
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Give every channel its width (Plan), one plan per recipe and budget. Deterministic.

    Examples: aatc allocate --budget 2.0; aatc allocate --recipe var-only --budget 4 --budget 3;
    aatc allocate --bytes 184MB --context 8192; aatc allocate --check run/plans/paper-2
    """
    from aatc_cli.console import print_json, print_table
    from aatc_cli.profiles import load_recipe
    from aatc_cli.stages.allocate import allocate as stage
    from aatc_cli.stages.files import Run

    if check is not None:
        if recipe or budget or ratio is not None or size is not None:
            from aatc_cli.errors import UsageError

            raise UsageError("--check takes recipe and budget from the plan", "leave out --recipe, --budget and so on")
        _check_plan(check, transform, json)
        return
    budgets = _budgets(budget, ratio, size, context)
    plans = [
        plan
        for name in recipe or ["paper"]
        for plan in stage(Run(run), load_recipe(name), budgets, transform=transform, force=force)
    ]
    tokens = context or 8192
    facts = [
        {
            "plan": str(plan.artifact.path), "digest": plan.artifact.manifest.digest, "recipe": plan.recipe.name,
            "budget": plan.budget.label, "bits_mean": plan.mean_bits,
            "predicted": plan.artifact.manifest.results["predicted"],
        } | plan.layout.summary(tokens)
        for plan in plans
    ]  # fmt: skip
    if json:
        print_json(facts)
        return
    rows = [
        [f["plan"], f"{f['bits_mean']:.3f}", f"{f['bits_effective']:.3f}", f"{f['ratio']:.2f}", f["digest"][:12]]
        for f in facts
    ]
    print_table(f"plans (bytes at {tokens} tokens)", ["plan", "bits", "effective bits", "ratio", "digest"], rows)


@app.command()
def inspect(
    path: Annotated[Path | None, typer.Argument(help="Artifact, evaluation file or run directory.")] = None,
    run: RunOption = Path("run"),
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan directory.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe. Default: paper.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Bits per channel.")] = None,
    ratio: RatioOption = None,
    size: BytesOption = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens at which bytes are counted.")] = 8192,
    profile: ProfileOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Look at a model before anything has run.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what is in an artifact, a run, a model or a profile at a budget.

    Examples: aatc inspect; aatc inspect --budget 2; aatc inspect --model MODEL;
    aatc inspect --profile llama-3.1-8b-instruct --budget 2.5 --context 8192 --json
    """
    from aatc_cli.config import make_budget
    from aatc_cli.printing import print_inspection
    from aatc_cli.stages import inspect as stage
    from aatc_cli.stages.files import Run, open_plan

    found = None
    if profile is not None:
        from aatc_cli.profiles import load_model_profile

        found = load_model_profile(profile)
    if model is not None:
        from aatc_cli.models.loading import find_model
        from aatc_cli.stages.inspect_model import inspect_model

        print_inspection(inspect_model(find_model(model), found), json)
    elif found is not None:
        from aatc_cli.profiles import load_recipe

        wanted = make_budget(bits=budget, ratio=ratio, size=size, context=context)
        print_inspection(stage.inspect_profile(found, load_recipe(recipe or "paper"), wanted, context), json)
    elif plan is not None:
        print_inspection(stage.inspect_plan(open_plan(plan), context), json)
    elif budget is not None or ratio is not None or size is not None:
        wanted = make_budget(bits=budget, ratio=ratio, size=size, context=context)
        print_inspection(stage.inspect_plan(open_plan(Run(path or run).plan(recipe or "paper", wanted)), context), json)
    else:
        print_inspection(stage.inspect_path(path or run, context), json)


@app.command(name="eval")
def evaluate(
    run: RunOption = Path("run"),
    task: Annotated[Literal["kl", "perplexity", "distortion"], typer.Option("--task", help="What to measure.")] = "kl",
    profile: ProfileOption = None,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    budget: BudgetOption = None,
    plan: Annotated[list[Path] | None, typer.Option("--plan", help="Plan directory; repeatable.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Held-out text, as for collect; repeatable, one file each.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens per window.")] = 1024,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Windows per text; 0 is all of it.")] = 4,
    first: Annotated[
        int | None,
        typer.Option("--first", min=0, help="First scored position. Default: 512 (kl, distortion), 0 (perplexity)."),
    ] = None,
    queries: Annotated[int, typer.Option("--queries", min=1, help="Query positions per window (distortion).")] = 8,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Measure the model with its compressed cache on text that calibration did not see (Evaluations).

    Plans are named by --plan, or by every combination of --recipe and --budget; --recipe fp16 is the reference.
    """
    from aatc_cli.printing import print_evaluations
    from aatc_cli.stages.evaluate import EvalOptions, EvalSettings
    from aatc_cli.stages.evaluate import evaluate as stage
    from aatc_cli.stages.files import Run

    source, _ = _model(model, profile)
    subjects = _subjects(Run(run), recipe, budget, plan)
    settings = EvalSettings(task, length, limit or None, first, queries)
    texts = text or ["builtin:python-docs-test"]
    results = stage(Run(run), source, subjects, texts, settings, EvalOptions(device, dtype, force))
    print_evaluations(results, json)


@app.command()
def report(
    run: RunOption = Path("run"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the report.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the run's report: Markdown, CSV, JSON and one self-contained HTML file with plots."""
    from aatc_cli.console import print_json, say
    from aatc_cli.stages.files import Run
    from aatc_cli.stages.report import make_report

    files = make_report(Run(run), title=title)
    if json:
        places = {"html": files.html, "markdown": files.markdown, "csv": files.csv, "json": files.json}
        print_json({kind: str(path) for kind, path in places.items()})
        return
    typer.echo(files.markdown.read_text(encoding="utf-8"))
    say(f"report: open {files.html}")


def _model(model: str | None, profile: str | None) -> tuple[ModelSource, ModelProfile | None]:
    from aatc_cli.errors import UsageError
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import load_model_profile

    found = load_model_profile(profile) if profile is not None else None
    if model is None and found is None:
        raise UsageError("no model was named", "give --model (hub id, folder or .gguf) or --profile, or set AATC_MODEL")
    return find_model(model if model is not None else found.model if found else ""), found


def _mixture(
    profile: ModelProfile | None, which: str, text: list[str] | None, samples: int | None, length: int | None
) -> TextMixture:
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import TextMixture

    base = None
    if profile is not None:
        base = profile.calibration.rates if which == "rates" else profile.calibration.transform
        if base is None:
            raise UsageError(f"profile {profile.name} has no {which} calibration", "leave out --calibration")
    sources = text or (base.sources if base else ["builtin:python-docs"])
    return TextMixture(
        sources=sources,
        samples=samples or (base.samples if base else 32),
        length=length or (base.length if base else 1024),
    )


def _budgets(budget: list[float] | None, ratio: float | None, size: str | None, context: int | None) -> list:  # type: ignore[type-arg]
    from aatc_cli.config import make_budget

    if budget and ratio is None and size is None:
        return [make_budget(bits=value) for value in budget]
    return [make_budget(bits=budget[0] if budget else None, ratio=ratio, size=size, context=context)]


def _subjects(run: Run, recipe: list[str] | None, budget: list[float] | None, plan: list[Path] | None) -> list[Subject]:
    from aatc_cli.config import make_budget
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_recipe
    from aatc_cli.stages.evaluate import Subject
    from aatc_cli.stages.files import open_plan

    subjects = []
    for path in plan or []:
        opened = open_plan(path)
        subjects.append(Subject(opened.recipe, opened))
    for name in recipe or ([] if plan else ["paper"]):
        loaded = load_recipe(name)
        if loaded.allocator == "none":
            subjects.append(Subject(loaded, None))
            continue
        if not budget:
            raise UsageError(f"recipe {name} needs a budget", "add --budget 2.0, or name plans by --plan")
        for value in budget:
            opened = open_plan(run.plan(loaded.name, make_budget(bits=value)))
            subjects.append(Subject(opened.recipe, opened))
    return subjects


def _check_plan(path: Path, transform: Path | None, json: bool) -> None:
    from dataclasses import asdict

    from aatc_cli.console import print_json, print_table
    from aatc_cli.stages.allocate import check
    from aatc_cli.stages.files import open_plan

    plan = open_plan(path)
    differences = check(plan, transform)
    if json:
        print_json({"plan": str(path), "identical": not differences, "differences": [asdict(d) for d in differences]})
    elif differences:
        rows = [[f"{d.layer} {d.side}", str(d.channel), str(d.planned), str(d.derived)] for d in differences[:50]]
        print_table(f"{path}: {len(differences)} channels differ", ["site", "channel", "planned", "derived"], rows)
    else:
        typer.echo(f"{path}: identical ({plan.artifact.manifest.digest[:12]})")
    if differences:
        raise typer.Exit(1)
