"""One layer's pressed cache: a simulated one whose evicted tokens nobody sees.

Evicted tokens are masked and not removed, so it answers what a cache would that holds the others alone; its size is the
byte law's. When a prompt ends, and whenever a block leaves the window, the press says what stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.attend import attention_weights, weighted_values
from aatc_cli.core.press.seen import LayerFacts, Prompt, step_angles
from aatc_cli.core.press.state import Pressed, PressState
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.runtime.simulated.store import SimulatedLayer, SimulatedStore
from aatc_cli.runtime.store import Coordinates, LayerView


@dataclass(frozen=True)
class PressPlace:
    """A press in one layer: kv heads, and the weight of the output projection where it asks for that."""

    pressed: Pressed
    layer: int
    heads: int
    output: Tensor | None


class PressedStore(SimulatedStore):
    """One layer of b sequences of equal length. ``state`` says which tokens of which head are left."""

    def __init__(
        self, layer: SimulatedLayer, window: Window, coordinates: Coordinates, empty: Tensor, place: PressPlace
    ) -> None:
        super().__init__(layer, window, coordinates, empty)
        self.place = place
        shape = int(empty.shape[0]), place.heads
        self.state = PressState.empty(place.pressed, window, shape, empty.device, place.layer)
        self.facts: LayerFacts | None = None
        # attention that tokens which are not in the store yet paid one another and the stored ones
        self._paid: Tensor | None = None

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """A prompt: rotated queries [b, Hq, n, D] and keys [b, H, n, D]."""
        self.facts = facts_of(view, self.place)
        angles = step_angles(*view.tables(0, 2))
        self.state.see(Prompt(query, keys, self.facts, angles))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens, and let the press choose when some leave the window."""
        super().append(keys, values)
        self.state.extend(max(self.tokens - self.state.tokens, 0))
        if self._paid is not None:
            self.state.pay(self._paid)
            self._paid = None
        assert self.facts is not None
        self.state.settle(self.packed, self.facts, self._values)

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over what is left and ``fresh`` tokens. -> [b, Hq, q, D]."""
        self.facts = facts_of(view, self.place)
        count, dim = int(query.shape[2]), int(query.shape[3])
        keys, values = (torch.unflatten(part, -1, (-1, dim)).transpose(1, 2) for part in self.rows([self]))
        if self.coordinates == "pre-rope":
            cos, sin = view.tables(0, self.tokens)
            keys = apply_rope(keys, cos[None], sin[None], view.rope)
        kept = self.state.kept
        if fresh is not None:
            keys, values = torch.cat((keys, fresh[0]), 2), torch.cat((values, fresh[1]), 2)
            kept = torch.cat((kept, kept.new_ones(*kept.shape[:2], count)), 2)
        places = torch.arange(int(keys.shape[2]), device=query.device)
        lag = places[-count:, None] - places
        allowed = (lag >= 0) & (lag < (view.sliding_window or int(places.numel()))) & kept[:, :, None, None]
        weights = attention_weights(query, keys, allowed, view.scaling, sinks=view.sinks, softcap=view.softcap)
        if fresh is None:
            self.state.pay(weights)
        elif self.state.pressed.rule.sums:
            self._paid = weights
        return weighted_values(weights, values).to(query.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name."""
        chosen = self.keys.new_empty(self.keys.shape[0], self.state.packed, 0)
        return super().tensors() | {"kept": self.state.kept, "received": self.state.received, "chosen": chosen}

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        super().load(tensors, tokens)
        self.state.kept, self.state.received = tensors["kept"], tensors["received"]
        self.state.packed = int(tensors["chosen"].shape[1])

    def adopt(self, other: PressedStore, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of ``other``, with what the press was told."""
        super().adopt(other, places)
        self.facts = other.facts
        if other.state.chosen is not None:
            self.state.chosen = other.state.chosen[torch.tensor(places, device=self.keys.device)]

    def again(self, after: PressedStore, keys: Tensor, values: Tensor) -> None:
        """Take again rows of a step that ``after`` has taken whole, with what the press left of a prompt among them."""
        self.facts = after.facts
        if not self.tokens:
            self.state = after.state.taken_back(int(keys.shape[1]))
        super().again(after, keys, values)

    def snapshot(self) -> PressedStore:
        """A store in the same state; raises `AatcError` where what was paid cannot be taken back."""
        if self.state.pressed.rule.sums:
            raise AatcError(
                f"press {self.state.pressed.rule.name} sums attention, which steps that are taken back have paid",
                "use a press that acts at the end of a prompt, or no drafts",
            )
        new = super().snapshot()
        assert isinstance(new, PressedStore)
        new.state = self.state.copy()
        return new

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones."""
        super().drop(count)
        self.state.drop(count)

    def _values(self) -> Tensor:
        """Values [b, H, T, D]: exact when a prompt ends, for presses that act then, else as they are held."""
        rows = self.values if self.state.pressed.acts == "prompt" else self.rows([self])[1]
        return torch.unflatten(rows, -1, (self.place.heads, -1)).transpose(1, 2)


def facts_of(view: LayerView, place: PressPlace) -> LayerFacts:
    """What a press in a layer is told of it."""
    return LayerFacts(view.scaling, view.rope, view.sliding_window, view.sinks, view.softcap, place.output)


def tell_choices(stores: Sequence[object], masks: Sequence[Sequence[Tensor]]) -> None:
    """Tell the pressed among the stores of all layers what stays of the next prompt: masks[row][layer] [1, H, P]."""
    states = [state for store in stores if isinstance(state := getattr(store, "state", None), PressState)]
    for state, rows in zip(states, zip(*masks, strict=True), strict=True):
        state.chosen = torch.cat(rows, 0)
