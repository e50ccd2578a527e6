"""Tokens fed one by one to a live cache, which the text or the model itself chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
class Stretch:
    """Some steps of decoding: all tokens so far [B, T], and logits [B, n, V] of the last n fed ones."""

    tokens: Tensor
    logits: Tensor


@torch.no_grad()
def decoded(
    session: Session, prompts: Tensor, steps: int, choose: Choose, encode: Encode, size: int
) -> Iterator[Stretch]:
    """Feed ``steps`` tokens behind prompts [B, P] to a new cache, in stretches of ``size`` steps.

    A stretch's tokens end with the one chosen behind its last logits, which is not fed yet. encode: the tokenizer, for
    presses that read a prompt twice.
    """
    model, mask = session.model, torch.ones_like(prompts)
    logits, cache = shared_prefill([session], prompts, mask, mask.cumsum(-1) - 1, encode)[0]
    tokens = torch.cat((prompts, choose(0, logits)[:, None]), 1)
    kept: list[Tensor] = []
    for step in range(1, steps + 1):
        with session.attached():
            out = model(
                tokens[:, -1:],
                attention_mask=torch.ones_like(tokens),
                position_ids=torch.full_like(tokens[:, -1:], tokens.shape[1] - 1),
                use_cache=True,
                logits_to_keep=1,
                **{session.keyword: cache},
            )
        kept.append(out.logits[:, -1])
        tokens = torch.cat((tokens, choose(step, kept[-1])[:, None].to(tokens.device)), 1)
        if len(kept) == size or step == steps:
            yield Stretch(tokens, torch.stack(kept, 1))
            kept = []
