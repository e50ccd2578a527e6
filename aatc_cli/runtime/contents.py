"""What a compressed cache holds under ``generate``: groups of sequences, their bytes, and steps that are taken back."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from aatc_cli.core.layout import IN_FULL
from aatc_cli.errors import AatcError
from aatc_cli.runtime.batch import Group, Step
from aatc_cli.runtime.spec import CacheSpec


class Contents:
    """The sequences of one compressed cache of ``spec``, sorted into groups of equal length.

    columns: tokens of the longest sequence, padding of the others included. recording: whether a step can be undone.
    refused: a step was broken off, and what is held is not whole.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.columns = 0
        self.batch = -1
        self.recording = False
        self.refused = False
        # of an assistant, which drafts several steps before it takes some of them back
        self.drafting = False
        self.groups: list[Group] = []
        self._done: list[Step] = []
        self._step: Step | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor by name; without a recorded step they are all the bytes there are."""
        return {
            f"groups.{g}.layers.{layer}.{name}": tensor
            for g, group in enumerate(self.groups)
            for layer, store in enumerate(group.stores)
            for name, tensor in store.tensors().items()
        }

    def bytes_live(self) -> int:
        """Bytes allocated for tokens; raises `AatcError` of a simulated cache, whose tensors are not the method's."""
        if self.spec.form.kind == "simulated":
            raise AatcError("a simulated cache holds full vectors", "read its method's size off the plan: aatc inspect")
        return sum(store.nbytes for group in self.groups for store in group.stores)

    def bytes_predicted(self) -> int:
        """What the byte law says, with all that is exact in the model's dtype; padding counts as nothing.

        Raises `AatcError` where no byte law is known: of a simulated cache that was made from bare codecs.
        """
        if self.spec.layout is None:
            raise AatcError(
                "a simulated cache of bare codecs, or of a pressed prompt, has no byte law of its tokens alone",
                "attach a plan without a press that acts at the end of a prompt",
            )
        share = self.spec.dtype.itemsize / 2
        total = 0.0
        for group in self.groups:
            parts = self.spec.layout.breakdown(group.length, len(group.rows))
            total += sum(count * (share if cause in IN_FULL else 1) for cause, count in parts.items())
        return round(total)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in this order, repeats allowed."""
        wanted: list[int] = rows.tolist()
        self._step, self._done = None, []
        if wanted == list(range(self.batch)):
            return
        groups = []
        for group in self.groups:
            place = {row: index for index, row in enumerate(group.rows)}
            new = [index for index, row in enumerate(wanted) if row in place]
            if new:
                groups.append(group.select([place[wanted[index]] for index in new], new, self.spec))
        self.groups, self.batch = groups, len(wanted)

    def crop(self, count: int) -> None:
        """Forget the ``count`` latest tokens of every sequence.

        A recorded step is undone exactly, as if its last tokens had never come. Otherwise only tokens that are still
        exact can go: those behind them stay packed. Raises `AatcError` when more is asked for, with nothing changed.
        """
        steps, self._done, self._step = self._done, [], None
        if count == 0:
            return
        if count <= sum(step.width for step in steps) and all(self._undoable(step, count) for step in steps):
            self.columns -= count
            while count:
                step = steps.pop()
                taken = min(count, step.width)
                self._undo(step, taken)
                count -= taken
            return
        room = min((group.length - self._least(group) for group in self.groups), default=0)
        if count > room:
            raise AatcError(
                f"cannot take back {count} tokens: only the latest {room} are still exact, the rest is packed",
                "copy the cache before the tokens you may want to take back, or begin a new one",
            )
        for group in self.groups:
            group.length -= count
            for store in group.stores:
                store.drop(count)
        self.columns -= count

    def _undoable(self, step: Step, count: int) -> bool:
        """Whether a recorded step can give back its last ``count`` columns, or all it has."""
        fits = len(step.before) == len(self.groups) and all(len(before) for before in step.before)
        return fits and all(new >= min(count, step.width) for new in step.counts)

    def _undo(self, step: Step, count: int) -> None:
        """Undo the last ``count`` tokens of a recorded step."""
        for group, new, before in zip(self.groups, step.counts, step.before, strict=True):
            group.length -= count
            kept = slice(step.width - new, step.width - count)
            for store, after, (keys, values) in zip(before, group.stores, step.given, strict=True):
                store.again(after, keys[group.rows, kept], values[group.rows, kept])
            group.stores = before

    def reset(self) -> None:
        """Forget everything."""
        self.groups, self.columns, self.batch, self.refused = [], 0, -1, False
        self._step, self._done = None, []

    def _least(self, group: Group) -> int:
        """Tokens that a crop without a recorded step must leave: none before anything is packed."""
        return max(store.least for store in group.stores)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(self.spec)
        new.columns, new.batch, new.recording, new.refused = self.columns, self.batch, self.recording, self.refused
        new.drafting = self.drafting
        new.groups = [group.select(list(range(len(group.rows))), list(group.rows), self.spec) for group in self.groups]
        return new
