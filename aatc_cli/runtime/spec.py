"""What all caches of one model and plan share, whatever their store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.config import Window
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, ExactLayer, geometry_of
from aatc_cli.models.layer_kinds import rope_switch
from aatc_cli.models.limits import context_limit
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.store import Form, Store


@dataclass(frozen=True)
class CacheSpec:
    """The form of the stores, and what the model says: window, dtype, device, context, exact layers, byte law.

    windows: for every layer of the model None, or the tokens that an exact sliding layer sees. switch: the length
    beyond which the model rotates with other frequencies, or None. layout is None where no byte law is known.
    """

    form: Form
    window: Window
    dtype: torch.dtype
    device: torch.device
    channels: int
    limit: int | None
    windows: tuple[int | None, ...]
    switch: int | None
    layout: CacheLayout | None
    room: int | None = None

    @classmethod
    def of(
        cls, model: nn.Module, layers: list[AttentionLayer], form: Form, window: Window, layout: CacheLayout | None
    ) -> Self:
        """The form's caches on ``model``."""
        config: Any = model.config
        parameter = next(model.parameters())
        return cls(
            form,
            window,
            parameter.dtype,
            parameter.device,
            geometry_of(config).channels,
            context_limit(config),
            tuple(layer.sliding_window if isinstance(layer, ExactLayer) else None for layer in layers),
            rope_switch(config),
            layout,
        )

    def with_room(self, room: int | None) -> Self:
        """The same with stores that have room for ``room`` tokens from the start."""
        return replace(self, room=room)

    def stores(self, batch: int) -> list[Store]:
        """Empty stores of every layer of the model for ``batch`` sequences."""
        made = iter(self.form.stores(batch, self.room))
        return [
            next(made) if window is None else SlidingStore(window, self.channels, batch, self.dtype, self.device)
            for window in self.windows
        ]

    def check_limit(self, before: int, after: int) -> None:
        """Raise `AatcError` where a cache of ``before`` tokens cannot have ``after``, padding left of them counted."""
        if self.switch is not None and 0 < before <= self.switch < after:
            raise AatcError(
                f"beyond {self.switch} tokens this model rotates with other frequencies: "
                "what it has cached would not fit",
                "begin a new cache with a longer prompt, given in one forward pass",
            )
        if self.limit is not None and after > self.limit:
            raise AatcError(
                f"{after} tokens are more than the model's context of {self.limit}",
                "use a shorter prompt or fewer new tokens",
            )

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that decides a stored number: the form with its codecs, window, dtype."""
        return digest_of([*self.form.facts(), self.window.model_dump(mode="json"), str(self.dtype)])


def check_layers(layers: list[AttentionLayer], count: int) -> list[AttentionSite]:
    """The compressed layers among ``layers``; raises `AatcError` unless there are ``count`` of them."""
    sites = [layer for layer in layers if isinstance(layer, AttentionSite)]
    if count != len(sites):
        raise AatcError(f"{count} layers of codecs for a model of {len(sites)}", "use a plan of this model")
    return sites
