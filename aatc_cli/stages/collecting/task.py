"""One collection: model and text, where its Stats go, and whether they are there already."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.artifact import unchanged
from aatc_cli.artifacts.manifest import Manifest, ModelIdentity
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import ModelSource
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.processes import Processes
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.text.windows import Windows


@dataclass(frozen=True)
class Task:
    """What is collected, and how: model and text, where the Stats go, and which of the processes this one is."""

    target: Path
    partial: Path
    source: ModelSource
    identity: ModelIdentity
    drawn: Windows
    bos: int | None
    settings: CollectSettings
    options: CollectOptions
    profile: ModelProfile | None
    processes: Processes
    # where the Stats of fewer windows are kept, by their number
    also: Mapping[int, Path]

    def existing(self) -> Manifest | None:
        """The finished Stats that are there already, if they are the ones asked for; refuses a checkpoint of others."""
        wanted = Stats.wanted(self.settings, self.identity, self.drawn.records)
        existing = unchanged(self.target, "stats", wanted, force=self.options.force)
        self._check_smaller(existing is not None)
        if existing is None:
            if self.options.force:
                shutil.rmtree(self.partial, ignore_errors=True)
            unchanged(self.partial, "stats", wanted, force=False)
            if self.processes.count > 1 and self.partial.exists():
                raise AatcError(
                    f"{self.partial} is the checkpoint of one process, which several cannot continue",
                    "finish it without torchrun, or start over with --force",
                )
        return existing

    def of_first(self, windows: int) -> CollectSettings:
        """Settings of the same draw of which only the first ``windows`` are collected."""
        return self.settings.model_copy(update={"first": windows})

    def _check_smaller(self, done: bool) -> None:
        """Refuse numbers that are no smaller ones, Stats of other settings in their place, and what came too late."""
        for windows, path in self.also.items():
            if windows >= self.settings.windows or self.processes.count > 1:
                why = f"of {self.settings.windows}" if self.processes.count == 1 else "with several processes"
                raise UsageError(f"Stats of {windows} windows are not kept on the way {why}", "leave --also out")
            wanted = Stats.wanted(self.of_first(windows), self.identity, self.drawn.records)
            if unchanged(path, "stats", wanted, force=self.options.force) is None and done:
                raise AatcError(
                    f"{self.target} is there and {path.name} is not, whose sums it has no more",
                    f"collect it by itself: --first {windows} --name {path.name}",
                )

    def how(self, model: Any) -> dict[str, Any]:
        """How it is collected, which no digest covers."""
        options, count = self.options, self.processes.count
        return (
            {"dtype": str(model.dtype).removeprefix("torch."), "device": options.device, "batch": options.batch}
            | ({"profile": self.profile.name} if self.profile else {})
            | ({"processes": count} if count > 1 else {})
            | ({"device_map": "auto"} if options.spread else {})
        )

    def job(self, model: Any) -> CollectJob:
        """Empty statistics of the attention layers of ``model``."""
        place, sites = self.options.place, attention_sites(model)
        return CollectJob(self.settings, self.identity, self.drawn, self.bos, sites, place, self.how(model))
