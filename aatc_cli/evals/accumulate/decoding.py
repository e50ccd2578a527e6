"""Tokens fed one by one to a live cache, which the text or the model itself chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.second_pass import Encode
from aatc_cli.runtime.session import Session

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

    def behind(self, done: int, count: int) -> Tensor:
        """The ``count`` - 1 tokens [B, count - 1] behind the one that is fed after ``done`` others."""
        begin = self.prompt + done + 1
        return self.tokens[:, begin : begin + count - 1]


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

    A stretch's tokens end with the one chosen behind its last logits, which is not fed yet. Tokens that are `Given` go
    through the model together up to the one that moves the window, which changes nothing that any of them reads.
    encode: the tokenizer, for presses that read a prompt twice.
    """
    mask = torch.ones_like(prompts)
    logits, cache = shared_prefill([session], prompts, mask, mask.cumsum(-1) - 1, encode)[0]
    tokens = torch.cat((prompts, choose(0, logits)[:, None]), 1)
    kept: list[Tensor] = []
    done = held = 0
    while done < steps:
        count = 1
        if isinstance(choose, Given):
            count = _together(session, tokens.shape[1] - 1, min(size - held, steps - done))
            tokens = torch.cat((tokens, choose.behind(done, count)), 1)
        logits = fed(session, cache, tokens, count)
        kept.append(logits)
        done, held = done + count, held + count
        tokens = torch.cat((tokens, choose(done, logits[:, -1])[:, None].to(tokens.device)), 1)
        if held == size or done == steps:
            yield Stretch(tokens, torch.cat(kept, 1))
            kept, held = [], 0


def fed(session: Session, cache: Any, tokens: Tensor, count: int) -> Tensor:
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
