"""The command whiten: a Transform from Stats, of a kind or as a recipe needs it."""

from __future__ import annotations

from inspect import Parameter
from typing import TYPE_CHECKING, Any

from aatc_cli.cli.making import given_settings, settings_parameters
from aatc_cli.cli.options import shared

if TYPE_CHECKING:
    from aatc_cli.cli.asked import WhitenAsked
    from aatc_cli.stages.whiten import Wanted


def whiten_parameters() -> list[Parameter]:
    """Parameters of the command."""
    from aatc_cli.cli.asked import WhitenAsked

    last = shared("device alone", "dry-run", "force", "json")
    return [*shared("run"), *settings_parameters(WhitenAsked), *last]


def whiten(values: dict[str, Any]) -> None:
    """Turn Stats into encode and decode matrices, variances, weights and scales (Transform). No model is needed."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.cli.asked import WhitenAsked
    from aatc_cli.cli.inspections import print_artifact, print_inspection
    from aatc_cli.stages.whiten import whiten as stage

    asked, run = given_settings(WhitenAsked, values), Run(values["run"])
    wanted = _wanted(asked)
    rates, other = asked.rate_stats or run.stats(), run.stats("stats-transform")
    basis = asked.transform_stats or (other if other.exists() else rates)
    if values["dry_run"]:
        from aatc_cli.stages.inspecting.forecast_algebra import forecast_whiten

        print_inspection(forecast_whiten(run, basis, rates, wanted).inspection(), values["json"])
        return
    how = {"device": values["device"], "force": values["force"]}
    manifest = stage(run, transform_stats=basis, rate_stats=rates, wanted=wanted, **how)
    print_artifact(run.transform(wanted.name), manifest.digest, values["json"])


def _wanted(asked: WhitenAsked) -> Wanted:
    """What is to be made; raises `UsageError` for a recipe and what a recipe says beside it."""
    from dataclasses import replace

    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_recipe
    from aatc_cli.stages.whiten import Wanted

    if asked.recipe is None:
        wanted = Wanted(asked.transform or "whiten", asked.key_groups or "profile", asked.value_groups or "profile")
    elif asked.transform or asked.key_groups or asked.value_groups:
        what = "--recipe says which transform and head groups"
        raise UsageError(what, "leave out --transform, --key-groups and --value-groups, or --recipe")
    else:
        wanted = Wanted.by(load_recipe(asked.recipe))
    return replace(wanted, head_groups=asked.head_groups, percentile=asked.percentile, shrinkage=asked.shrinkage)
