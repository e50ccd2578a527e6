"""The statistics that collect is gathering: what is gathered, how it goes to disk and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import Manifest, ModelIdentity
from aatc_cli.artifacts.stats import CollectSettings, Stats, TextVariety
from aatc_cli.core.stats import LayerStats, output_gram
from aatc_cli.errors import AatcError, SettingsMismatchError
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.placement import at_hand, device_of
from aatc_cli.stages.collecting.checks import value_rank
from aatc_cli.text.overlap import block_hashes
from aatc_cli.text.windows import Windows


class CollectJob:
    """The statistics being collected, and how they go to disk and come back.

    They lie on ``device``, or without one each layer's where the layer computes.
    """

    def __init__(
        self,
        settings: CollectSettings,
        identity: ModelIdentity,
        drawn: Windows,
        bos: int | None,
        sites: list[AttentionSite],
        device: str | None,
        how: dict[str, Any],
    ) -> None:
        self.settings, self.identity, self.sites, self.how = settings, identity, sites, how
        # windows whose sums, and whose gradients, are in it so far
        self.windows = self.gradients = 0
        self.texts, self.blocks = drawn.records, block_hashes(drawn.tokens, bos)
        self.distinct = len(set(drawn.tokens.flatten().tolist()))
        geometry = identity.geometry
        rows = min(settings.rows, self.tokens(settings.samples))
        self.layers = [
            LayerStats.empty(geometry, rows, output_gram(_finite_output(site, device), geometry), settings.below)
            for site in sites
        ]

    def tokens(self, windows: int) -> int:
        """Calibration tokens in ``windows`` windows."""
        return self.settings.tokens(windows)

    def quota(self, window: int) -> int:
        """Rows kept of one window, so that all windows together keep ``rows``."""
        rows, samples = self.settings.rows, self.settings.samples
        return rows * (window + 1) // samples - rows * window // samples

    def begin_at(self, window: int, gradients: int) -> None:
        """Leave windows before ``window``, and gradients before those of ``gradients``, to other processes."""
        self.windows, self.gradients = window, gradients
        kept = self.settings.length - self.settings.skip_first
        for layer in self.layers:
            layer.filled = sum(min(self.quota(earlier), kept) for earlier in range(window))

    def write(self, path: Path, windows: int, fisher: int, settings: CollectSettings | None = None) -> Manifest:
        """Write the sums after ``windows`` windows, and gradients of ``fisher`` of them, as a Stats at ``path``.

        settings: those that these sums come from, where not all windows that are collected.
        """
        variety = TextVariety(self.blocks, self.distinct, value_rank(self.layers))
        done, settings = (windows, fisher), settings or self.settings
        return Stats.write(path, settings, self.identity, self.texts, self.layers, variety, done=done, how=self.how)

    def resume(self, path: Path) -> tuple[int, int]:
        """Take the sums of the checkpoint at ``path``, if there is one; the windows and Fisher windows it covers.

        Raises `SettingsMismatchError` when the model ran in another dtype before: sums of both would be of neither.
        """
        if not path.exists():
            return 0, 0
        stats = Stats.open(path, unfinished=True)
        before, now = stats.manifest.provenance.get("dtype"), self.how["dtype"]
        if before != now:
            raise SettingsMismatchError(
                f"the checkpoint {path} was collected in {before}, now the model runs in {now}",
                f"add --dtype {before} to continue it, or --force to start over",
            )
        for index, layer in enumerate(self.layers):
            saved = stats.layer(index)
            for name, tensor in saved.tensors().items():
                held: Tensor = getattr(layer, name)
                held[: tensor.shape[0]] = tensor.to(held.device)
            layer.count, layer.filled = saved.count, saved.filled
        self.windows, self.gradients = stats.windows, stats.fisher_windows
        return self.windows, self.gradients


def _finite_output(site: AttentionSite, device: str | None) -> Tensor:
    """The weight of the output projection on ``device``, or without one where the layer computes."""
    # no hook sees what the last layer's output projection gives, so its weight is looked at itself
    with at_hand(site.o):
        weight = site.o.weight.detach().to(device_of(site.o) if device is None else device)
    if not bool(torch.isfinite(weight).all()):
        problem = f"the output projection of layer {site.layer} is not finite"
        raise AatcError(problem, "mend or replace the model's weights")
    return weight
