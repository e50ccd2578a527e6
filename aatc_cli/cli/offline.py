"""The offline commands that make what plans are made from: collect and whiten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aatc_cli.cli.choosing import find_source
from aatc_cli.cli.options import (
    DeviceMapOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RunOption,
)
from aatc_cli.errors import UsageError
from aatc_cli.methods.registry import names

if TYPE_CHECKING:
    from aatc_cli.profiles import ModelProfile, TextMixture

    TransformName = str
else:
    # the command line offers what the registry has
    TransformName = Literal[tuple(names("transform"))]


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
    fisher_batch: Annotated[
        int | None, typer.Option("--fisher-batch", min=1, help="Windows per gradient pass. Default: --batch.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute layers again in gradient passes: less memory, one pass more.")
    ] = False,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", min=0, help="Seconds between checkpoints.")
    ] = 60.0,
    device: DeviceOption = "cpu",
    device_map: DeviceMapOption = "none",
    dtype: DtypeOption = "auto",
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Run the model over calibration text and keep its statistics (Stats).

    Interrupted, it continues from its last checkpoint when started again with the same options, and ends with the
    same result. Example: aatc collect --profile smollm2-135m-instruct --model .models/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.cli.inspections import print_artifact
    from aatc_cli.stages.collect import collect as stage
    from aatc_cli.stages.collecting.settings import CollectOptions

    source, found = find_source(model, profile)
    mixture = _mixture(found, calibration, text, samples, length)
    settings = CollectSettings(
        samples=mixture.samples,
        length=mixture.length,
        seed=seed,
        rows=rows,
        skip_first=skip_first,
        fisher=fisher,
        head_groups=found.head_groups if found else 1,
    )
    options = CollectOptions(
        device, dtype, batch, checkpoint_seconds, force, fisher_batch, recompute, spread=device_map == "auto"
    )
    target = name if name is not None else "stats" if calibration == "rates" else "stats-transform"
    if dry_run:
        from aatc_cli.cli.inspections import print_inspection
        from aatc_cli.stages.inspecting.forecasts import forecast_collect

        print_inspection(forecast_collect(Run(run), target, source, settings, device, found).inspection(), json)
        return
    manifest = stage(Run(run), target, source, mixture, settings, options, found)
    if manifest is not None:
        print_artifact(run / target, manifest.digest, json)


def whiten(
    run: RunOption = Path("run"),
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Make what this recipe needs: its transform, head groups and tables.")
    ] = None,
    transform: Annotated[
        TransformName | None,
        typer.Option(
            "--transform", help="Kind of transform; metric needs Stats collected with --fisher. Default: whiten."
        ),
    ] = None,
    transform_stats: Annotated[
        Path | None,
        typer.Option("--transform-stats", help="Stats for the matrices. Default: stats-transform, else stats."),
    ] = None,
    rate_stats: Annotated[
        Path | None, typer.Option("--rate-stats", help="Stats for variances, weights and scales. Default: stats.")
    ] = None,
    head_groups: Annotated[
        int | None,
        typer.Option(
            "--head-groups", min=1, help="Head groups per layer, for keys and values. Default: the profile's."
        ),
    ] = None,
    key_groups: Annotated[
        Literal["profile", "per-head", "four-heads", "all"] | None,
        typer.Option(
            "--key-groups", help="Heads whose keys are transformed jointly; profile, the default, is --head-groups."
        ),
    ] = None,
    value_groups: Annotated[
        Literal["profile", "per-head", "four-heads", "all"] | None,
        typer.Option("--value-groups", help="The same for values."),
    ] = None,
    percentile: Annotated[float, typer.Option("--percentile", help="Percentile of |h| used as channel scale.")] = 99.0,
    shrinkage: Annotated[
        float, typer.Option("--shrinkage", help="Share of the loss metric that is replaced by its diagonal, 0 to 1.")
    ] = 0.1,
    device: DeviceOption = "cpu",
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Turn Stats into encode and decode matrices, variances, weights and scales (Transform). No model is needed."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.inspections import print_artifact
    from aatc_cli.profiles import load_recipe
    from aatc_cli.stages.whiten import Wanted
    from aatc_cli.stages.whiten import whiten as stage

    if recipe is None:
        wanted = Wanted(transform or "whiten", key_groups or "profile", value_groups or "profile")
    elif transform or key_groups or value_groups:
        what = "--recipe says which transform and head groups"
        raise UsageError(what, "leave out --transform, --key-groups and --value-groups, or --recipe")
    else:
        wanted = Wanted.by(load_recipe(recipe))
    wanted = replace(wanted, head_groups=head_groups, percentile=percentile, shrinkage=shrinkage)
    place = Run(run)
    rates = rate_stats or place.stats()
    basis = transform_stats or (place.stats("stats-transform") if place.stats("stats-transform").exists() else rates)
    if dry_run:
        from aatc_cli.cli.inspections import print_inspection
        from aatc_cli.stages.inspecting.forecasts import forecast_whiten

        print_inspection(forecast_whiten(place, basis, rates, wanted).inspection(), json)
        return
    manifest = stage(place, transform_stats=basis, rate_stats=rates, wanted=wanted, device=device, force=force)
    print_artifact(place.transform(wanted.name), manifest.digest, json)


def _mixture(
    profile: ModelProfile | None, which: str, text: list[str] | None, samples: int | None, length: int | None
) -> TextMixture:
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
