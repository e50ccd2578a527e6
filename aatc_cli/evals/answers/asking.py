"""Prompts put to every subject at once: one pass fills all caches, and each subject then answers from its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aatc_cli.console import progress
from aatc_cli.evals.answers.generation import Batch, generate
from aatc_cli.evals.answers.shared import SharedSteps
from aatc_cli.evals.caches import session_of
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.generation import chat_tokens, end_tokens, plain_tokens
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.runtime.fused_tiles.ragged import has_shared_step
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.session import Session
from aatc_cli.text.ruler.prompt import Metric, Prompt, Sample
from aatc_cli.text.ruler.score import score


@dataclass(frozen=True)
class Answer:
    """What was generated behind one prompt, and its score between 0 and 1."""

    text: str
    score: float


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt, *, chat: bool) -> list[int]:
    """Tokens of a prompt, plain or as a turn of a chat; raises `AatcError` without a chat template."""
    if chat:
        return chat_tokens(tokenizer, prompt.text, prompt.prefix)
    return plain_tokens(tokenizer, prompt.text + prompt.prefix)


@dataclass
class Asker:
    """The model of a call, and the caches that were made ready for it."""

    opened: Opened
    caches: dict[str, Session] = field(default_factory=dict)
    shared: dict[str, SharedSteps] = field(default_factory=dict)

    def answers(
        self, what: str, samples: list[Sample], metric: Metric, room: int, subjects: Sequence[Subject]
    ) -> tuple[list[list[Answer]], float]:
        """Answers by subject and sample, in the order of both, and seconds per subject."""
        caches = [self._cache(subject) for subject in subjects]
        # prompts of equal length share a store in the packed cache, so neighbours in length go together
        order = sorted(range(len(samples)), key=lambda index: len(samples[index].tokens))
        found: list[dict[int, Answer]] = [{} for _ in subjects]
        began, batch = time.perf_counter(), self.opened.options.batch
        with progress(f"eval {what}", len(order)) as ticker:
            for start in range(0, len(order), batch):
                places = order[start : start + batch]
                part = [samples[place] for place in places]
                for mine, theirs in zip(found, self._part(part, metric, room, caches), strict=True):
                    mine |= dict(zip(places, theirs, strict=True))
                ticker.advance(len(part))
        seconds = (time.perf_counter() - began) / len(subjects)
        return [[mine[place] for place in range(len(samples))] for mine in found], seconds

    def _part(self, samples: list[Sample], metric: Metric, room: int, caches: list[Session]) -> list[list[Answer]]:
        """Answers to a batch of samples by cache."""
        model: Any = self.opened.model()
        tokenizer = self.opened.tokenizer

        def answer(row: int, tokens: list[int]) -> Answer:
            text = tokenizer.raw.decode(tokens, skip_special_tokens=True)
            return Answer(text, score(text, samples[row].prompt.answers, metric))

        texts = generate(
            model,
            cache_keyword(model),
            Batch.of([s.tokens for s in samples], torch.device(self.opened.options.device)),
            [self._steps(cache) for cache in caches],
            lambda b: shared_prefill(caches, b.ids, b.mask, b.positions, tokenizer.encode),
            room,
            end_tokens(model),
            # the score never falls as the text grows, so a full one cannot change any more
            lambda row, tokens: answer(row, tokens).score == 1.0,
        )
        return [[answer(row, tokens) for row, tokens in enumerate(found)] for found in texts]

    def _steps(self, session: Session) -> Session | SharedSteps:
        """What answers: the session, or the step that sequences of any lengths share where its caches have one."""
        if not has_shared_step(session):
            return session
        return self.shared.setdefault(session.name, SharedSteps(session))

    def _cache(self, subject: Subject) -> Session:
        if subject.name not in self.caches:
            self.caches[subject.name] = session_of(subject, self.opened.model(), self.opened.options)
        return self.caches[subject.name]
