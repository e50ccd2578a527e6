"""What options of the offline commands ask for: a model of settings for each, which its options are made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from aatc_cli.cli.options import PLAN_HELP
from aatc_cli.config import Budget, Settings, make_budget
from aatc_cli.errors import UsageError
from aatc_cli.methods.registry import names

if TYPE_CHECKING:
    TransformName = str
else:
    # the command line offers what the registry has
    TransformName = Literal[tuple(names("transform"))]

_Groups = Literal["profile", "per-head", "four-heads", "all"]
_Tokens = Annotated[int, Field(ge=1, le=2**40)]


class CalibrationAsked(Settings):
    """Which text Stats are collected of, and what they are called."""

    text: tuple[str, ...] | None = Field(
        None,
        description="Calibration text, repeatable, each with an optional @WEIGHT: builtin:python-docs, FILE, "
        "FILE.jsonl:FIELD, hf:DATASET:CONFIG:SPLIT:FIELD. Default: the profile's mixture.",
    )
    calibration: Literal["rates", "transform"] = Field("rates", description="Which of the profile's mixtures to use.")
    name: str | None = Field(None, description="Name of the Stats in the run.")
    samples: int | None = Field(None, ge=1, description="Windows over all texts.")
    length: int | None = Field(None, ge=2, description="Tokens per window.")

    @property
    def target(self) -> str:
        """Name of the Stats in the run."""
        usual = "stats" if self.calibration == "rates" else "stats-transform"
        return self.name if self.name is not None else usual


class WhitenAsked(Settings):
    """Which Transform is made, of which Stats."""

    recipe: str | None = Field(None, description="Make what this recipe needs: its transform, head groups and tables.")
    transform: TransformName | None = Field(
        None, description="Kind of transform; metric needs Stats collected with --fisher. Default: whiten."
    )
    transform_stats: Path | None = Field(
        None, description="Stats for the matrices. Default: stats-transform, else stats."
    )
    rate_stats: Path | None = Field(None, description="Stats for variances, weights and scales. Default: stats.")
    head_groups: int | None = Field(
        None, ge=1, description="Head groups per layer, for keys and values. Default: the profile's."
    )
    key_groups: _Groups | None = Field(
        None, description="Heads whose keys are transformed jointly; profile, the default, is --head-groups."
    )
    value_groups: _Groups | None = Field(None, description="The same for values.")
    percentile: float = Field(99.0, allow_inf_nan=True, description="Percentile of |h| used as channel scale.")
    shrinkage: float = Field(
        0.1, allow_inf_nan=True, description="Share of the loss metric that is replaced by its diagonal, 0 to 1."
    )


class AllocateAsked(Settings):
    """At how many tokens bytes are counted, from which Transform, and whether plans are only checked."""

    context: _Tokens | None = Field(None, description="Tokens for --ratio and --bytes.")
    transform: Path | None = Field(None, description="Transform. Default: the run's.")
    check: Path | None = Field(
        None, description="Re-derive this plan; exit 0 if identical, 1 with the difference otherwise."
    )


class InspectAsked(Settings):
    """What is looked at, where no path says so."""

    plan: str | None = Field(None, description=PLAN_HELP)
    recipe: str | None = Field(None, description="Recipe. Default: paper.")
    budget: float | None = Field(None, description="Bits per channel.")
    ratio: float | None = None
    bytes: str | None = None
    context: _Tokens = Field(8192, description="Tokens at which bytes are counted.")
    profile: str | None = None
    model: str | None = Field(None, description="Look at a model before anything has run.")

    @property
    def budgeted(self) -> bool:
        """Whether a budget was named, in any unit."""
        return any(each is not None for each in (self.budget, self.ratio, self.bytes))

    @property
    def wanted(self) -> Budget:
        """The budget that was named; raises `UsageError` for none or more than one."""
        return make_budget(bits=self.budget, ratio=self.ratio, size=self.bytes, context=self.context)

    def check(self, path: Path | None, other: Path | None) -> None:
        """Raise `UsageError` where two things are named to be looked at, one of which would be passed over."""
        options = (("--plan", self.plan), ("--profile", self.profile), ("--model", self.model))
        named = [] if path is None else [str(path)]
        named += [name for name, value in options if value is not None]
        if other is not None and (len(named) > 1 or self.budgeted):
            raise UsageError("two artifacts are compared as they are", "leave out the options")
        # a profile goes with the model that it is of
        if len(named) > 1 and set(named) != {"--profile", "--model"}:
            raise UsageError(f"{' and '.join(named)} are two things to look at", "name one")
        if self.recipe is not None and self.profile is None and not self.budgeted:
            problem = "--recipe is read with --budget, --ratio or --bytes"
            raise UsageError(problem, "add one of them, or leave out --recipe")
        if self.budgeted and (self.plan is not None or self.model is not None):
            raise UsageError(f"a budget is no part of {named[0]}", "leave it out, or name a profile or a run")
