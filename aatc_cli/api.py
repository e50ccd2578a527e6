"""The Python interface: the offline stages with the settings of the command line, and plans on models.

    import aatc_cli as aatc

Names are of the package itself, and nothing heavy is imported before one of them is used. Errors that a caller can act
on are `AatcError`, with ``message`` and ``hint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from aatc_cli.artifacts.plan import Plan as PlanArtifact
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import make_budget
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.loading import find_model, load_same
from aatc_cli.profiles import TextMixture, explain, load_recipe
from aatc_cli.runtime.attach import attach
from aatc_cli.runtime.session import CacheChoice, Session
from aatc_cli.stages.allocate import allocate as allocate_stage
from aatc_cli.stages.collect import collect as collect_stage
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.whiten import Wanted
from aatc_cli.stages.whiten import whiten as whiten_stage

__all__ = ["AatcError", "CollectOptions", "Plan", "Session", "allocate", "collect", "open_plan", "whiten"]


@dataclass(frozen=True)
class Plan:
    """A plan to be used: what it costs, the model it belongs to, and its cache on that model."""

    artifact: PlanArtifact

    @property
    def name(self) -> str:
        """Recipe and budget: ``paper-2``."""
        return self.artifact.name

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.artifact.path

    @property
    def digest(self) -> str:
        """sha256 of all that it says; equal plans have equal digests on any machine."""
        return self.artifact.digest

    @property
    def packed_bits(self) -> float:
        """Bits that a number of a packed token takes with all that goes with it."""
        return self.artifact.layout.bits_packed

    def bytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the cache at ``tokens`` tokens in each of ``batch`` sequences."""
        return self.artifact.layout.bytes(tokens, batch)

    def uncompressed_bytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the float16 cache of the same tokens."""
        return self.artifact.layout.reference_bytes(tokens, batch)

    def load_model(self, model: str, *, device: str = "cpu", dtype: str = "auto") -> tuple[Any, Any]:
        """The model (hub id, folder or .gguf file) and its tokenizer, once it is sure that the plan is of this model.

        Raises `ArtifactError` naming the first difference to the model that the plan was made for.
        """
        return load_same(find_model(model), self.artifact.model, str(self.path), device=device, dtype=dtype)

    def attach(self, model: nn.Module, cache: CacheChoice = "auto") -> AbstractContextManager[Session]:
        """Attach caches of the plan to ``model`` while the block lasts (`runtime.attach.attach`)."""
        return attach(model, self.artifact, cache)


def open_plan(path: str | Path) -> Plan:
    """The plan in the folder ``path``; raises `ArtifactError` when it is absent or damaged."""
    return Plan(PlanArtifact.open(Path(path)))


def collect(
    model: str,
    texts: Sequence[str],
    *,
    run: str | Path = "run",
    name: str = "stats",
    options: CollectOptions | None = None,
    **settings: Any,
) -> Stats:
    """Statistics of a model over calibration ``texts``, as ``aatc collect`` makes them.

    settings: those of `artifacts.stats.CollectSettings` (samples, length, fisher, ...). Raises `UsageError` for a
    setting that is unknown or out of range, and what the stage raises.
    """
    try:
        chosen = CollectSettings.model_validate({"samples": 32, "length": 1024} | settings)
    except ValidationError as error:
        raise UsageError(explain(error), "settings are those of aatc collect --help") from error
    place = Run(Path(run))
    mixture = TextMixture(sources=list(texts), samples=chosen.samples, length=chosen.length)
    collect_stage(place, name, find_model(model), mixture, chosen, options or CollectOptions())
    return Stats.open(place.stats(name))


def whiten(
    recipe: str = "paper", *, run: str | Path = "run", stats: str = "stats", device: str = "cpu", force: bool = False
) -> Transform:
    """The Transform that a recipe needs, from the Stats of a run, as ``aatc whiten --recipe`` makes it."""
    place, wanted = Run(Path(run)), Wanted.by(load_recipe(recipe))
    source = place.stats(stats)
    whiten_stage(place, transform_stats=source, rate_stats=source, wanted=wanted, device=device, force=force)
    return Transform.open(place.transform(wanted.name))


def allocate(
    recipe: str = "paper", *, bits: Sequence[float], run: str | Path = "run", force: bool = False
) -> list[Plan]:
    """One plan for each budget in bits per channel, as ``aatc allocate`` makes them."""
    budgets = [make_budget(bits=value) for value in bits]
    return [Plan(plan) for plan in allocate_stage(Run(Path(run)), load_recipe(recipe), budgets, force=force)]
