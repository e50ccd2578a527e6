"""The exact rows of a cache: its sinks, and a ring of the recent tokens.

Token t >= s lies in ring slot (t - s) mod w. The ring grows to at most w slots, so that no storage is larger than what
`core.layout` counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.layout import exact_slots


class ExactRows:
    """Rows of b sequences of equal length in the model's dtype, keys before RoPE.

    sink_keys, sink_values [b, min(T, s), C]; ring_keys, ring_values [b, min(T - s, w), C].
    """

    NAMES = ("sink_keys", "sink_values", "ring_keys", "ring_values")

    def __init__(self, window: Window, empty: Tensor) -> None:
        self.window = window
        self.sink_keys, self.sink_values, self.ring_keys, self.ring_values = (empty.clone() for _ in self.NAMES)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.NAMES}

    def frozen(self) -> dict[str, Tensor]:
        """The same as they are now: rings are written in place, so they are copied."""
        return self.tensors() | {"ring_keys": self.ring_keys.clone(), "ring_values": self.ring_values.clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these in place."""
        for name in self.NAMES:
            setattr(self, name, tensors[name])

    def fill_sinks(self, keys: Tensor, values: Tensor, tokens: int) -> int:
        """Take the sinks among rows [b, n, C] that follow ``tokens`` tokens; how many they are."""
        free = min(max(self.window.sinks - tokens, 0), keys.shape[1])
        if free:
            self.sink_keys = torch.cat((self.sink_keys, keys[:, :free]), 1)
            self.sink_values = torch.cat((self.sink_values, values[:, :free]), 1)
        return free

    def slots(self, start: int, stop: int) -> Tensor:
        """Slots of the tokens ``start`` .. ``stop`` - 1, counted behind the sinks."""
        return torch.arange(start, stop, device=self.ring_keys.device) % self.window.recent

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, n, C] of the tokens ``start`` .. ``stop`` - 1 behind the sinks, in order."""
        slots = self.slots(start, stop)
        return self.ring_keys.index_select(1, slots), self.ring_values.index_select(1, slots)

    def write(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Write rows [b, n, C] of the tokens from ``before`` behind the sinks on; the oldest make room."""
        after = before + keys.shape[1]
        slots = min(after, self.window.recent)
        if slots > self.ring_keys.shape[1]:
            grown = (keys.shape[0], slots, keys.shape[2])
            ring_keys, ring_values = keys.new_empty(grown), values.new_empty(grown)
            ring_keys[:, : self.ring_keys.shape[1]] = self.ring_keys
            ring_values[:, : self.ring_values.shape[1]] = self.ring_values
            self.ring_keys, self.ring_values = ring_keys, ring_values
        first = max(before, after - self.window.recent)
        places = self.slots(first, after)
        self.ring_keys[:, places] = keys[:, first - before :]
        self.ring_values[:, places] = values[:, first - before :]

    def shorten(self, tokens: int) -> None:
        """Keep what ``tokens`` tokens need."""
        sinks, slots = exact_slots(tokens, self.window)
        self.sink_keys, self.sink_values = self.sink_keys[:, :sinks].clone(), self.sink_values[:, :sinks].clone()
        if slots < self.ring_keys.shape[1]:
            self.ring_keys, self.ring_values = self.ring_keys[:, :slots].clone(), self.ring_values[:, :slots].clone()
