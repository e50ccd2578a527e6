"""Tokens fed one by one to a live cache, which the text or the model itself chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.errors import AatcError
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.in_place import InPlaceSteps
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.second_pass import Encode
from aatc_cli.runtime.session import Session

# tokens written ahead that may differ from those of the cache by rounding, and their share of many
_TIES, _SHARE = 2, 0.01

# tokens [B] behind the logits [B, V] of step 0, 1, ...
Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Draw:
    """Draws tokens from logits: of every window with numbers of its own, the same for every cache.

    Two caches that think nearly alike so write nearly the same. numbers [B, steps] between 0 and 1.
    """

    numbers: Tensor
    temperature: float

    @classmethod
    def of(cls, seed: int, windows: range, steps: int, temperature: float) -> Draw:
        """For the windows of these numbers."""
        made = [torch.rand(steps, generator=torch.Generator().manual_seed(seed * 1_000_003 + w)) for w in windows]
        return cls(torch.stack(made).to(torch.float64), temperature)

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        """Tokens [B]; greedy at temperature 0."""
        if self.temperature == 0:
            return logits.argmax(-1)
        shares = torch.softmax(logits.to(torch.float64) / self.temperature, -1).cumsum(-1)
        wanted = self.numbers[:, step, None].to(logits.device) * shares[:, -1:]
        return torch.searchsorted(shares, wanted, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)


@dataclass(frozen=True)
class Given:
    """Chooses tokens that are there already. tokens [B, prompt + steps + 1]: the prompts and all that is fed."""

    tokens: Tensor
    prompt: int

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        """Tokens [B]."""
        return self.tokens[:, self.prompt + step]

    def next(self, done: int, last: Tensor, count: int) -> list[Tensor]:
        """The ``count`` - 1 tokens behind ``last``, which is fed after ``done`` others: one tensor [B, count - 1]."""
        begin = self.prompt + done + 1
        return [self.tokens[:, begin : begin + count - 1]]


@dataclass
class Ahead:
    """Writes what the cache will write, in place and ahead of it, with the numbers that it draws with."""

    writer: InPlaceSteps
    choose: Choose
    seen: int = 0
    other: int = 0

    def next(self, done: int, last: Tensor, count: int) -> list[Tensor]:
        """The ``count`` - 1 tokens [B, 1] behind ``last``, which is fed after ``done`` others.

        A token that is fed alone moves the window before it reads: it is written in place when that has happened.
        """
        found: list[Tensor] = []
        for step in range(count if count > 1 else 0):
            logits = self.writer.step(found[-1][:, 0] if found else last)
            if step < count - 1:
                found.append(self.choose(done + step + 1, logits)[:, None])
        return found

    def check(self, done: int, tokens: Tensor, logits: Tensor) -> None:
        """See the ``logits`` [B, n, V] of the last n of ``tokens`` [B, T], which the cache now holds.

        Raises `AatcError` where it would have written others more often than rounding explains.
        """
        count = logits.shape[1]
        if count == 1:
            self.writer.refresh()
            self.writer.step(tokens[:, -1])
            return
        mine = torch.stack([self.choose(done + step + 1, logits[:, step]) for step in range(count - 1)], 1)
        self.seen += mine.numel()
        self.other += int((mine != tokens[:, 1 - count :]).sum())
        if self.other > max(_TIES, self.seen * _SHARE):
            raise AatcError(
                f"{self.other} of {self.seen} tokens are not those that the cache writes one by one",
                "use --way text, and report this plan and model",
            )


@dataclass(frozen=True)
class Stretch:
    """Some steps of decoding: all tokens so far [B, T], and logits [B, n, V] of the last n fed ones."""

    tokens: Tensor
    logits: Tensor


@torch.no_grad()
def decoded(
    session: Session, prompts: Tensor, steps: int, choose: Choose, encode: Encode, size: int
) -> Iterator[Stretch]:
    """Feed ``steps`` tokens behind prompts [B, P] to a new cache, in stretches of ``size`` steps.

    A stretch's tokens end with the one chosen behind its last logits, which is not fed yet. Tokens go through the model
    together up to the one that moves the window, which changes nothing that any of them reads: those that are `Given`,
    and those that `runtime.in_place` has written ahead. encode: the tokenizer, for presses that read a prompt twice.
    Raises `AatcError` where the cache would have written other tokens than were written ahead.
    """
    logits, cache, ahead = _begun(session, prompts, steps, choose, encode)
    tokens = torch.cat((prompts, choose(0, logits)[:, None]), 1)
    kept: list[Tensor] = []
    done = held = 0
    while done < steps:
        count = _together(session, tokens.shape[1] - 1, min(size - held, steps - done)) if ahead else 1
        tokens = torch.cat((tokens, *(ahead.next(done, tokens[:, -1], count) if ahead else [])), 1)
        logits = _fed(session, cache, tokens, count)
        if isinstance(ahead, Ahead):
            ahead.check(done, tokens, logits)
        kept.append(logits)
        done, held = done + count, held + count
        tokens = torch.cat((tokens, choose(done, logits[:, -1])[:, None].to(tokens.device)), 1)
        if held == size or done == steps:
            yield Stretch(tokens, torch.cat(kept, 1))
            kept, held = [], 0


def _begun(
    session: Session, prompts: Tensor, steps: int, choose: Choose, encode: Encode
) -> tuple[Tensor, Any, Given | Ahead | None]:
    """Logits [B, V] behind the prompts, the filled cache, and how the next tokens are known before they are fed."""
    mask = torch.ones_like(prompts)
    positions = mask.cumsum(-1) - 1
    if isinstance(choose, Given):
        logits, cache = shared_prefill([session], prompts, mask, positions, encode)[0]
        return logits, cache, choose
    sessions = [session] if session.spec is None else [session, plain(session.model)]
    found = shared_prefill(sessions, prompts, mask, positions, encode)
    (logits, cache), (_, own) = found[0], found[-1]
    room = prompts.shape[1] + steps
    writer = InPlaceSteps.of(session, cache, own, prompts.shape[1], room)
    return logits, cache, None if writer is None else Ahead(writer, choose)


def _fed(session: Session, cache: Any, tokens: Tensor, count: int) -> Tensor:
    """Logits [B, count, V] of the last ``count`` of ``tokens`` [B, T], which enter the cache in one pass."""
    model: Any = session.model
    places = torch.arange(tokens.shape[1] - count, tokens.shape[1], device=tokens.device)
    with session.attached():
        out = model(
            tokens[:, -count:],
            attention_mask=torch.ones_like(tokens),
            position_ids=places.expand(tokens.shape[0], -1),
            use_cache=True,
            logits_to_keep=count,
            **{session.keyword: cache},
        )
    logits: Tensor = out.logits
    return logits


def _together(session: Session, cached: int, most: int) -> int:
    """How many of the next ``most`` tokens may be fed at once behind ``cached`` ones: none after the first packs any.

    A token by itself is stored before it reads, so the one that makes others leave the window already reads them
    packed; it goes alone.
    """
    if session.spec is None:
        return most
    window = session.spec.window
    free = 0
    while free < most and packed_tokens(cached + free + 1, window) == packed_tokens(cached, window):
        free += 1
    return max(free, 1)
