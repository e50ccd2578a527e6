"""What several caches write behind the same prompts, each its own text, all in one batch of steps in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.evals.accumulate.decoding import Draw, Stretch, decoded, fed
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.in_place import InPlaceSteps
from aatc_cli.runtime.lanes import Lane, can_step
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.second_pass import Encode
from aatc_cli.runtime.session import Session

# tokens that a cache reads otherwise than they were written by rounding, and their share of many
_TIES, _SHARE = 2, 0.01
# bytes of the logits of all caches that are held
_ROOM = 6 << 30


@torch.no_grad()
def written(
    sessions: Sequence[Session], prompts: Tensor, steps: int, draw: Draw, encode: Encode, size: int
) -> Iterator[list[tuple[int, Stretch]]]:
    """What the caches of ``sessions`` write behind ``prompts`` [B, P] in ``steps`` steps, in stretches of ``size``.

    Yields for every session by its place a stretch, whose tokens end with one that is not fed yet, and whose logits are
    written over afterwards; stretches are shorter where the logits of all would take too much room. Sessions that can
    be stepped in place go together, the others one by one after them, token by token. encode: the tokenizer, for
    presses that read a prompt twice. Raises `AatcError` where a cache of tiles would have written other tokens.
    """
    mask = torch.ones_like(prompts)
    everyone = [*sessions, plain(sessions[0].model)]
    found = shared_prefill(everyone, prompts, mask, mask.cumsum(-1) - 1, encode)
    logits, own = found[-1]
    places = [place for place, session in enumerate(sessions) if can_step(session, found[place][1])]
    if places:
        batch, cached = prompts.shape
        lanes = [
            Lane(sessions[place], found[place][1], slice(row * batch, (row + 1) * batch), cached)
            for row, place in enumerate(places)
        ]
        size = min(size, max(_ROOM // (logits.nbytes * len(lanes)), 1))
        desk = _Desk.of(InPlaceSteps(lanes, own, cached, cached + steps), prompts, logits, draw, size)
        for step in range(steps):
            desk.step(step)
            if desk.held == size or step + 1 == steps:
                yield list(zip(places, desk.stretches(), strict=True))
    for place, session in enumerate(sessions):
        if place not in places:
            for stretch in decoded(session, prompts, steps, draw, encode, size):
                yield [(place, stretch)]


@dataclass
class _Desk:
    """All lanes with the tokens [S B, T] that they have written, and the logits [n, S B, V] of ``held`` of them."""

    steps: InPlaceSteps
    tokens: Tensor
    draw: Draw
    kept: Tensor
    held: int = 0
    seen: int = 0
    other: int = 0

    @classmethod
    def of(cls, steps: InPlaceSteps, prompts: Tensor, logits: Tensor, draw: Draw, size: int) -> _Desk:
        """Before the first step; logits [B, V] behind the prompts; size: how many logits are held."""
        copies = len(steps.lanes)
        wide = replace(draw, numbers=draw.numbers.to(prompts.device).repeat(copies, 1))
        first = wide(0, logits.repeat(copies, 1))
        kept = logits.new_empty(size, copies * logits.shape[0], logits.shape[1])
        return cls(steps, torch.cat((prompts.repeat(copies, 1), first[:, None]), 1), wide, kept)

    def step(self, step: int) -> None:
        """Feed the latest token of every lane and draw the next."""
        for lane in self.steps.lanes:
            if lane.moves(self.tokens.shape[1] - 1):
                if lane.reads:
                    self._read(lane, step)
                else:
                    self.steps.tell(lane)
        logits = self.steps.step(self.tokens[:, -1])
        self.kept[self.held] = logits
        self.held += 1
        self.tokens = torch.cat((self.tokens, self.draw(step + 1, logits)[:, None]), 1)

    def stretches(self) -> list[Stretch]:
        """What every lane has written since the last time."""
        logits, self.held = self.kept[: self.held].transpose(0, 1), 0
        return [Stretch(self.tokens[lane.rows], logits[lane.rows]) for lane in self.steps.lanes]

    def _read(self, lane: Lane, step: int) -> None:
        """Let a cache read what its lane has written: together up to the token that moves the window, then that one.

        A token by itself is stored before it reads, so the one that makes others leave the window reads them packed.
        """
        tokens = self.tokens[lane.rows]
        pending = tokens.shape[1] - 1 - lane.fed
        if pending:
            logits = fed(lane.session, lane.cache, tokens[:, :-1], pending)
            mine = replace(self.draw, numbers=self.draw.numbers[lane.rows])
            drawn = torch.stack([mine(step - pending + one + 1, logits[:, one]) for one in range(pending)], 1)
            self.seen += drawn.numel()
            self.other += int((drawn != tokens[:, -pending:]).sum())
            if self.other > max(_TIES, self.seen * _SHARE):
                raise AatcError(
                    f"{self.other} of {self.seen} tokens are not those that {lane.session.name} writes one by one",
                    "use --way text, and report this plan and model",
                )
        fed(lane.session, lane.cache, tokens, 1)
        lane.fed = tokens.shape[1]
        self.steps.refresh(lane)
