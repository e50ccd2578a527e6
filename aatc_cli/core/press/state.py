"""A press at work in one layer: what it has seen so far, and which tokens are left.

The evaluator and the simulated cache both keep one for every layer and tell it the same things in the same order: a
prompt, tokens that come, attention that is paid, and the values when a block leaves the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.press.choice import kept_count
from aatc_cli.core.press.priced import Levels
from aatc_cli.core.press.reading import Reading
from aatc_cli.core.press.seen import LayerFacts, Prompt, Seen, by_kv_head
from aatc_cli.errors import AatcError


class Rule(Protocol):
    """What is asked of a press; `methods.press.Press` has it."""

    name: ClassVar[str]
    acts: ClassVar[Literal["prompt", "flush"]]
    sums: ClassVar[bool]
    rereads: ClassVar[bool]
    says_classes: ClassVar[bool]
    output: ClassVar[bool]

    def keep(self, seen: Seen, count: int) -> Tensor:
        """The candidates that stay, ``count`` a head on average: mask [B, H, T]."""
        ...

    def over_readings(self, readings: Sequence[Reading], among: Tensor, packed: int, pressed: Pressed) -> list[Tensor]:
        """By layer [1, H, P] the classes of a prompt's tokens, -1 where evicted, of a press that reads it twice."""
        ...


@dataclass(frozen=True)
class Pressed:
    """A press and the share of the packed tokens that it leaves, or above 1 their number, as a plan has them.

    costs: bytes of a token by layer and kv head, by which heads share places; empty where all heads are alike. levels:
    what the classes of tiles cost, of a press that says them.
    """

    rule: Rule
    share: float
    costs: tuple[tuple[float, ...], ...] = ()
    levels: Levels | None = None

    @property
    def classes(self) -> int:
        """Classes that it puts tokens into beside eviction."""
        return 1 if self.levels is None else int(self.levels.bytes.shape[2])

    def costs_of(self, layer: int) -> Tensor | None:
        """Of the heads of one layer, relative to their mean: [H]."""
        return relative(self.costs[layer]) if self.costs else None

    def costs_of_all(self) -> Tensor | None:
        """Of all heads of all layers: [L H]."""
        return relative([cost for layer in self.costs for cost in layer]) if self.costs else None

    @property
    def acts(self) -> Literal["prompt", "flush"]:
        """When it acts: once, when a prompt ends, or whenever a block leaves the window."""
        return self.rule.acts


def relative(costs: Sequence[float]) -> Tensor:
    """Costs over their mean, in float64; of codes without any bytes all are alike."""
    found = torch.tensor(costs, dtype=torch.float64)
    mean = found.mean()
    return found / mean if bool(mean > 0) else torch.ones_like(found)


class PressState:
    """One layer of b sequences of equal length. kept [b, H, T]: not evicted; received [b, H, T] where it is asked for.

    packed: tokens behind the sinks that have been chosen from, the evicted ones counted.
    """

    def __init__(self, pressed: Pressed, window: Window, kept: Tensor, received: Tensor, layer: int = 0) -> None:
        self.pressed, self.window, self.layer = pressed, window, layer
        self.kept, self.received, self.packed = kept, received, 0
        self.prompt: Prompt | None = None
        # tokens of the prompt that was seen
        self.prompted = 0
        # of a press that reads the prompt twice: its choice [b, H, P], made before the prompt goes in; -1 is evicted
        self.chosen: Tensor | None = None
        # of one that says them the classes [b, H, P] of the prompt's tokens, once it has ended
        self.classes: Tensor | None = None

    @classmethod
    def empty(
        cls, pressed: Pressed, window: Window, shape: tuple[int, int], device: torch.device, layer: int = 0
    ) -> Self:
        """Of no tokens of ``shape`` [b, H]; layer counts compressed layers."""
        kept = torch.ones(*shape, 0, dtype=torch.bool, device=device)
        return cls(pressed, window, kept, torch.zeros(*shape, 0, device=device), layer)

    @property
    def tokens(self) -> int:
        """Tokens it was told of."""
        return int(self.kept.shape[2])

    def extend(self, count: int) -> None:
        """The next ``count`` tokens come in."""
        shape = (*self.kept.shape[:2], count)
        self.kept = torch.cat((self.kept, self.kept.new_ones(shape)), 2)
        self.received = torch.cat((self.received, self.received.new_zeros(shape)), 2)

    def see(self, prompt: Prompt) -> None:
        """A prompt attended to itself; its tokens are the first that come in."""
        self.prompt, self.prompted = prompt, int(prompt.keys.shape[2])
        self.extend(int(prompt.keys.shape[2]))
        if self.pressed.rule.sums:
            self.received = prompt.received().to(self.received.dtype)

    def pay(self, weights: Tensor) -> None:
        """Queries paid ``weights`` [b, Hq, n, S] to the first S tokens."""
        if self.pressed.rule.sums:
            paid = by_kv_head(weights, int(self.kept.shape[1])).to(self.received.dtype)
            self.received = torch.cat(
                (self.received[..., : paid.shape[2]] + paid, self.received[..., paid.shape[2] :]), 2
            )

    def settle(self, packed: int, facts: LayerFacts, values: Callable[[], Tensor]) -> None:
        """``packed`` tokens behind the sinks have left the window: choose which of them stay.

        values: gives those of all tokens [b, H, T, D] as the cache holds them.
        """
        at_end = self.pressed.acts == "prompt"
        prompt, self.prompt = self.prompt, None
        if packed <= self.packed or (at_end and prompt is None):
            self.packed = max(packed, self.packed)
            return
        self.packed = packed
        places = torch.arange(self.tokens, device=self.kept.device)
        among = (places >= self.window.sinks) & (places < self.window.sinks + packed)
        if self.pressed.rule.rereads:
            self._take(among)
            return
        sums = self.received if self.pressed.rule.sums else None
        costs = self.pressed.costs_of(self.layer)
        seen = Seen(facts, values(), self.kept, self.kept & among, sums, prompt if at_end else None, costs)
        stay = self.pressed.rule.keep(seen, kept_count(packed, self.pressed.share))
        self.kept = torch.where(among, stay, self.kept)

    def _take(self, among: Tensor) -> None:
        if self.chosen is None:
            raise AatcError(
                f"press {self.pressed.rule.name} reads a prompt a second time, for which nobody gave it the tokens",
                "use aatc eval, which does, or a press that needs no second pass",
            )
        self.kept = torch.where(among, self.chosen >= 0, self.kept)
        self.classes = self.chosen if self.pressed.rule.says_classes else None
        self.chosen = None

    def select(self, index: Tensor) -> PressState:
        """The same of the sequences ``index`` [n]."""
        new = self.copy()
        new.kept, new.received = (part.index_select(0, index) for part in (self.kept, self.received))
        new.chosen = None if self.chosen is None else self.chosen.index_select(0, index)
        new.classes = None if self.classes is None else self.classes.index_select(0, index)
        return new

    def copy(self) -> PressState:
        """The same; tensors are only ever replaced, so they are shared."""
        new = PressState(self.pressed, self.window, self.kept, self.received, self.layer)
        new.packed, new.prompt, new.prompted = self.packed, self.prompt, self.prompted
        new.chosen, new.classes = self.chosen, self.classes
        return new

    def taken_back(self, tokens: int) -> PressState:
        """As it is behind the first ``tokens`` of the step that a prompt came with, the others never having come.

        Of a press that acts at flushes, which chooses anew as they come again, nothing. Raises `AatcError` for less
        than the prompt, of which it would have chosen other tokens.
        """
        if self.pressed.acts != "prompt":
            return PressState.empty(
                self.pressed, self.window, (self.kept.shape[0], self.kept.shape[1]), self.kept.device, self.layer
            )
        if tokens < self.prompted:
            raise AatcError(
                f"press {self.pressed.rule.name} chose among all tokens of the prompt, of which some are taken back",
                "begin a new cache with the shorter prompt",
            )
        new = self.copy()
        new.drop(self.tokens - tokens)
        return new

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens."""
        self.kept, self.received = self.kept[..., : self.tokens - count], self.received[..., : self.tokens - count]
