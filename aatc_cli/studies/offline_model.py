"""A random model of a geometry, on which the passes of collect are timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Geometry
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.collecting.stopwatch import clock
from aatc_cli.text.windows import Windows

# rotary base of Llama 3.1
_THETA = 500_000.0
# passes of a repeat
PASSES = 2
# tokens of a window that enter no statistic
_SKIPPED = 4

Size = tuple[int, int]


class _Silent:
    """A progress bar that shows nothing."""

    def advance(self, steps: int = 1) -> None:
        """Nothing."""


@dataclass
class OfflineBench:
    """A random model of a geometry, and the passes of collect over random tokens that are timed on it."""

    geometry: Geometry
    model: Any
    device: torch.device

    @classmethod
    def of(cls, profile: ModelProfile, device: torch.device, dtype: torch.dtype) -> OfflineBench:
        """The model of a profile's geometry with weights drawn on ``device``."""
        return cls(profile.geometry, random_llama(profile.geometry, profile.context, _THETA, device, dtype), device)

    def windows(self, size: Size) -> Tensor:
        """Random tokens [W, T] of W = passes times batch windows, or of more where they would be too few to whiten."""
        context, batch = size
        few = -(-self.geometry.channels // (context - _SKIPPED))
        count = -(-max(PASSES * batch, few) // batch) * batch
        generator = torch.Generator().manual_seed(context)
        return torch.randint(0, self.model.config.vocab_size, (count, context), generator=generator)

    def job(self, windows: Tensor) -> CollectJob:
        """Empty statistics for ``windows``."""
        count, length = windows.shape
        settings = CollectSettings(samples=count, length=length, skip_first=_SKIPPED, fisher=count)
        nothing = "0" * 64
        identity = ModelIdentity(
            name="random",
            revision=None,
            architecture="llama",
            config_hash=nothing,
            weights_fingerprint=nothing,
            tokenizer_hash=nothing,
            geometry=self.geometry,
        )
        how = {"dtype": str(self.model.dtype).removeprefix("torch."), "device": str(self.device)}
        drawn = Windows(windows.cpu(), [], nothing)
        return CollectJob(settings, identity, drawn, None, attention_sites(self.model), str(self.device), how)

    @torch.no_grad()
    def forward(self, windows: Tensor, batch: int) -> float:
        """Seconds of bare forward passes of the model's body."""
        began = clock(str(self.device))
        for part in torch.split(windows, batch):
            self.model.get_decoder()(input_ids=part.to(self.device), use_cache=False)
        return clock(str(self.device)) - began

    def statistics(self, windows: Tensor, batch: int, job: CollectJob | None = None) -> float:
        """Seconds of the same passes with statistics, into ``job`` or one of their own."""
        job = job or self.job(windows)
        began = clock(str(self.device))
        run_forward(job, self.model, windows, 0, self._options(batch), Timer(), Path(), _Silent())
        return clock(str(self.device)) - began

    def gradients(self, windows: Tensor, batch: int, job: CollectJob | None = None) -> float:
        """Seconds of gradient passes over the same windows; raises `AatcError` where they do not fit."""
        job = job or self.job(windows)
        began = clock(str(self.device))
        run_gradients(job, self.model, windows, 0, self._options(batch), Timer(), Path(), _Silent())
        return clock(str(self.device)) - began

    def _options(self, batch: int) -> CollectOptions:
        return CollectOptions(device=str(self.device), batch=batch, checkpoint_seconds=float("inf"))
