"""The preamble of every task: the model, its tokenizer, its identity, and the subjects it is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.run import Run
from aatc_cli.console import working
from aatc_cli.errors import UsageError
from aatc_cli.evals.subjects import EvalOptions, Subject, origin_of, require_subjects
from aatc_cli.models.limits import check_length
from aatc_cli.models.loading import (
    ModelSource,
    Tokenizer,
    identify,
    leading_device,
    load_config,
    load_model,
    load_tokenizer,
)
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile


@dataclass
class Opened:
    """A model that is ready to be loaded, and what is to be measured on it. ``task`` is the name of the task."""

    task: str
    run: Run
    source: ModelSource
    subjects: Sequence[Subject]
    options: EvalOptions
    config: Any
    tokenizer: Tokenizer
    identity: ModelIdentity
    _model: Any = field(default=None, repr=False)

    def model(self) -> Any:
        """The model with its weights, loaded when it is first asked for."""
        if self._model is None:
            with working(f"loading {self.source.name}"):
                placed = "auto" if self.options.spread else None
                self._model = load_model(
                    self.source, device=self.options.device, dtype=self.options.dtype, device_map=placed
                )
        return self._model

    def check_length(self, length: int, option: str = "--length", beside: int = 0) -> None:
        """Raise `AatcError` for more tokens than the model has positions; ``beside`` the option's own."""
        check_length(length, self.config, option, beside)

    def origin(self, subject: Subject) -> dict[str, Any]:
        """The fields of a `Measurement` that say of which subject and model it is and where it ran."""
        return origin_of(subject, self.identity, self.options)

    def protocol(self, **asked: Any) -> dict[str, Any]:
        """All that determines a number beside its subject: model, dtype, kind of device, versions, what was asked."""
        origin = origin_of(None, self.identity, self.options)
        versions = {name: origin["versions"][name] for name in ("aatc", "torch", "transformers")}
        return {
            "task": self.task,
            "weights": self.identity.weights_fingerprint,
            "config": self.identity.config_hash,
            "dtype": origin["dtype"],
            "device": self.options.device.partition(":")[0],
            "versions": versions,
            **asked,
        }


def open_subjects(
    task: str,
    run: Run,
    source: ModelSource,
    subjects: Sequence[Subject],
    options: EvalOptions,
    profile: ModelProfile | None = None,
) -> Opened:
    """Open the model and check that it is the one of all subjects; its weights are loaded when they are needed.

    Raises `UsageError` without subjects, `ArtifactError` for a plan of another model, `AatcError` for a model that
    cannot be opened or is not the one of ``profile``.
    """
    if not subjects:
        raise UsageError("nothing to evaluate", "name plans by --recipe and --budget, or by --plan")
    options = replace(options, device=leading_device(options.device, spread=options.spread))
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    check_profile(profile, identity.geometry)
    require_subjects(identity, subjects)
    return Opened(task, run, source, subjects, options, config, tokenizer, identity)
