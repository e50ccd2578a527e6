"""The command collect: statistics of a model over calibration text."""

from __future__ import annotations

from inspect import Parameter
from typing import TYPE_CHECKING, Any

from aatc_cli.cli.choosing import find_source
from aatc_cli.cli.making import given_settings, settings_parameters
from aatc_cli.cli.options import shared

if TYPE_CHECKING:
    from aatc_cli.cli.asked import CalibrationAsked
    from aatc_cli.profiles import ModelProfile, TextMixture


def collect_parameters() -> list[Parameter]:
    """Parameters of the command."""
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.cli.asked import CalibrationAsked
    from aatc_cli.stages.collecting.settings import CollectOptions

    return [
        *shared("run", "model"),
        *settings_parameters(CalibrationAsked),
        *settings_parameters(CollectSettings, "seed", "rows", "skip_first", "fisher", "first", "below"),
        *settings_parameters(CollectOptions, "batch", "fisher_batch", "recompute", "checkpoint_seconds", "also"),
        *shared("device", "device-map", "dry-run", "force", "json"),
    ]


def collect(values: dict[str, Any]) -> None:
    """Run the model over calibration text and keep its statistics (Stats).

    Interrupted, it continues from its last checkpoint when started again with the same options, and ends with the
    same result. Example: aatc collect --profile smollm2-135m-instruct --model .models/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.cli.asked import CalibrationAsked
    from aatc_cli.cli.inspections import print_artifact, print_inspection
    from aatc_cli.stages.collect import collect as stage
    from aatc_cli.stages.collecting.settings import CollectOptions

    asked = given_settings(CalibrationAsked, values)
    source, profile = find_source(values["model"], values["profile"])
    mixture = _mixture(profile, asked)
    values |= {"samples": mixture.samples, "length": mixture.length, "spread": values["device_map"] == "auto"}
    values["head_groups"] = profile.head_groups if profile else 1
    settings, options = given_settings(CollectSettings, values), given_settings(CollectOptions, values)
    run = Run(values["run"])
    if values["dry_run"]:
        from aatc_cli.stages.inspecting.forecast_model import forecast_collect

        forecast = forecast_collect(run, asked.target, source, settings, options.device, profile)
        print_inspection(forecast.inspection(), values["json"])
        return
    manifest = stage(run, asked.target, source, mixture, settings, options, profile)
    if manifest is not None:
        print_artifact(run.root / asked.target, manifest.digest, values["json"])


def _mixture(profile: ModelProfile | None, asked: CalibrationAsked) -> TextMixture:
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import TextMixture

    base = None
    if profile is not None:
        base = profile.calibration.rates if asked.calibration == "rates" else profile.calibration.transform
        if base is None:
            problem = f"profile {profile.name} has no {asked.calibration} calibration"
            raise UsageError(problem, "leave out --calibration")
    sources = list(asked.text or (base.sources if base else ["builtin:python-docs"]))
    return TextMixture(
        sources=sources,
        samples=asked.samples or (base.samples if base else 32),
        length=asked.length or (base.length if base else 1024),
    )
