"""Greedy generation for a batch of prompts with the caches of several subjects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aatc_cli.evals.answers.shared import SharedSteps


class Generator(Protocol):
    """Makes caches of a subject. ``attached`` lasts as long as the model is given a cache that ``new_cache`` made."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    def attached(self) -> AbstractContextManager[Any]:
        """Bring the model's attention to these caches; nothing to do for the model's own."""
        ...


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts: ids and mask [B, T], the mask 1 where a token is real."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> Batch:
        """The batch of these token lists."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return cls(ids.to(device), mask.to(device))

    @property
    def positions(self) -> Tensor:
        """Positions [B, T] of the tokens, counted from each prompt's first."""
        return (self.mask.cumsum(-1) - 1).clamp_min(0)


# logits [B, V] behind the prompts, and the filled cache, of every subject
Prefill = Callable[[Batch], list[tuple[Tensor, Any]]]
# whether the text of a prompt (by its place in the batch) can end here: tokens generated so far
Finished = Callable[[int, list[int]], bool]


@torch.no_grad()
def generate(
    model: Any,
    keyword: str,
    batch: Batch,
    caches: Sequence[Generator],
    prefill: Prefill,
    limit: int,
    ends: frozenset[int],
    finished: Finished,
) -> list[list[list[int]]]:
    """At most ``limit`` greedy tokens behind every prompt, by subject and place in the batch.

    ``keyword`` names the model's cache argument. A text ends before a token of ``ends`` (which is not part of it), or
    when ``finished`` says so; it then leaves the batch.
    """
    texts = []
    for subject, (logits, cache) in zip(caches, prefill(batch), strict=True):
        with subject.attached():
            if isinstance(subject, SharedSteps):
                texts.append(subject.continued(logits, cache, limit, ends, finished))
            else:
                texts.append(_continue(model, keyword, batch.mask, logits, cache, limit, ends, finished))
    return texts


def _continue(
    model: Any,
    keyword: str,
    mask: Tensor,
    logits: Tensor,
    cache: Any,
    limit: int,
    ends: frozenset[int],
    finished: Finished,
) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(logits.shape[0])]
    rows = list(range(len(texts)))
    for count in range(1, limit + 1):
        tokens = logits.argmax(-1)
        going = []
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if token in ends:
                continue
            texts[row].append(token)
            if not finished(row, texts[row]):
                going.append(place)
        if not going or count == limit:
            break
        if len(going) < len(rows):
            kept = torch.tensor(going, device=mask.device)
            rows, tokens, mask = [rows[place] for place in going], tokens[kept], mask[kept]
            cache.batch_select_indices(kept)
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), 1)
        logits = model(
            tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            use_cache=True,
            logits_to_keep=1,
            **{keyword: cache},
        ).logits[:, -1]
    return texts
