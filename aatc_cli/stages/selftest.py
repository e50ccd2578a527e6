"""The selftest of doctor: every stage on a tiny random model, and the packed cache against the evaluator of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.console import hushed
from aatc_cli.models.loading import ModelSource, find_model
from aatc_cli.models.tiny import write_tiny_llama
from aatc_cli.profiles import TextMixture
from aatc_cli.stages.collect import collect
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.selftesting.agreement import packed_agrees
from aatc_cli.stages.selftesting.divergence import divergence_grows
from aatc_cli.stages.selftesting.planned import derived_alike
from aatc_cli.stages.whiten import whiten

_SAMPLES, _LENGTH = 6, 192
_TEXT = "builtin:python-docs"


@dataclass
class Selftest:
    """The steps in their order, each on what the one before left in ``folder``; a step returns what it found."""

    folder: Path
    _plans: list[Plan] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        """Name and function of every step."""
        return [
            ("model", self._model),
            ("collect", self._collect),
            ("whiten", self._whiten),
            ("allocate", self._allocate),
            ("eval", self._eval),
            ("packed cache", self._packed),
        ]

    @property
    def _run(self) -> Run:
        return Run(self.folder / "run")

    @property
    def _source(self) -> ModelSource:
        return find_model(str(self.folder / "model"))

    def _model(self) -> str:
        write_tiny_llama(self.folder / "model")
        return "a random Llama of 4 layers"

    def _collect(self) -> str:
        settings = CollectSettings(samples=_SAMPLES, length=_LENGTH, rows=256)
        mixture = TextMixture(sources=[_TEXT], samples=_SAMPLES, length=_LENGTH)
        with hushed():
            collect(self._run, "stats", self._source, mixture, settings, CollectOptions())
        return f"{_SAMPLES} windows of {_LENGTH} tokens"

    def _whiten(self) -> str:
        stats = self._run.stats()
        with hushed():
            manifest = whiten(self._run, transform_stats=stats, rate_stats=stats)
        return f"digest {manifest.digest[:12]}"

    def _allocate(self) -> str:
        self._plans.append(derived_alike(self._run))
        return f"3 bits, derived twice alike; digest {self._plans[0].digest[:12]}"

    def _eval(self) -> str:
        return divergence_grows(self._run, self._source, self._plans[0], f"{_TEXT}-test", _LENGTH)

    def _packed(self) -> str:
        return packed_agrees(self._source, self._plans[0], _TEXT, _LENGTH)
