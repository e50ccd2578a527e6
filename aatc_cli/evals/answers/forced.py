"""Answers that are appended and not generated: one pass a prompt says how likely each token of the answer is.

The prompt is one prefill and its answer is decoded token by token, as the caches of `runtime` do it, so what a query of
the answer reads is what generation would read. A string of an answer is found where all its tokens are the most likely
ones, given those before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.console import progress
from aatc_cli.evals.forced.behind import Shelf
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.forced.teacher_forced import Method, check_finite
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.adapter import AttentionSite, attention_sites
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.second_pass import Reader
from aatc_cli.text.ruler.prompt import Reference, Sample


class Job(Protocol):
    """What is asked: prompts, and behind each of them the tokens whose likelihood is looked at."""

    @property
    def what(self) -> str:
        """Its name in progress."""
        ...

    @property
    def samples(self) -> Sequence[Sample]:
        """The prompts; those of equal length go through the model together."""
        ...

    @property
    def references(self) -> Sequence[Reference]:
        """What is written behind each of them."""
        ...


@dataclass(frozen=True)
class Forced:
    """One answer, and its strings: whether all tokens of each were most likely, and its log-probability in nats.

    right: the share of the strings' tokens that were most likely.
    """

    strings: tuple[tuple[bool, float], ...]
    right: float

    @property
    def score(self) -> float:
        """The share of the strings whose tokens were all most likely."""
        return sum(found for found, _ in self.strings) / len(self.strings)

    @property
    def logprob(self) -> float:
        """Log-probability of all strings, nats."""
        return sum(each for _, each in self.strings)


class Forcer:
    """The model of a call, and the codecs of its subjects that were made ready."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.model = opened.model()
        self.sites: list[AttentionSite] = attention_sites(self.model)
        self.reader = Reader(self.opened.tokenizer.encode)
        self._methods: dict[str, Method | None] = {}

    def answers(self, job: Job, subjects: Sequence[Subject]) -> tuple[list[list[Forced]], list[float]]:
        """Answers by subject and sample, and seconds of every subject; raises `AatcError` for logits not finite."""
        found = [(answers, seconds) for _, answers, seconds in self.each(job, subjects)]
        return [answers for answers, _ in found], [seconds for _, seconds in found]

    def each(self, job: Job, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, list[Forced], float]]:
        """As `answers`, subject by subject, so that what one has answered can be kept before the next is asked."""
        batches = [(places, *self._filled(job, places)) for places in _batches(job, self.opened.options.batch)]
        shelf = Shelf(self.model, self.sites)
        with progress(f"eval {job.what}, forced", len(job.samples) * len(subjects)) as ticker:
            for subject in subjects:
                found: dict[int, Forced] = {}
                began = time.perf_counter()
                for place, (places, tokens, behind) in enumerate(batches):
                    logits = shelf.seen(place, tokens).logits(self.model, self.sites, self._method(subject), behind)
                    if not bool(torch.isfinite(logits).all()):
                        for row, sample in enumerate(places):
                            check_finite(logits[row], subject.name, sample)
                    answers = forced_answers(logits, [job.references[sample] for sample in places])
                    found.update(zip(places, answers, strict=True))
                    ticker.advance(len(places), text=f"eval {job.what}: {subject.name}")
                yield subject, [found[place] for place in range(len(job.samples))], time.perf_counter() - began

    def _filled(self, job: Job, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prompts of one length [B, P], and their answers, filled up behind, [B, n]."""
        answers = [job.references[place].tokens for place in places]
        width = max(len(answer) for answer in answers)
        behind = torch.tensor([answer + [answer[-1]] * (width - len(answer)) for answer in answers])
        device = input_device(self.model)
        return torch.tensor([job.samples[place].tokens for place in places]).to(device), behind.to(device)

    def _method(self, subject: Subject) -> Method | None:
        """The codecs of a subject; None of the reference, which is read exactly."""
        if subject.name not in self._methods:
            made = method_of(subject, self.sites, self.opened.options, self.reader)
            self._methods[subject.name] = None if subject.plan is None else made
        return self._methods[subject.name]


def forced_answers(logits: Tensor, references: Sequence[Reference]) -> list[Forced]:
    """The answers whose tokens were given, from the logits [B, n, V] before each of them.

    Answers may be shorter than n: what stands behind them is not looked at. Asked of the device all at once, since a
    GPU is waited for with every question.
    """
    rights, chances = [], []
    for row, reference in zip(logits, references, strict=True):
        tokens = torch.tensor(reference.tokens, device=logits.device)
        mine = row[: len(tokens)]
        rights.append(mine.argmax(-1) == tokens)
        chances.append(torch.log_softmax(mine.to(torch.float64), -1).gather(1, tokens[:, None])[:, 0])
    right, each = torch.cat(rights).tolist(), torch.cat(chances).tolist()
    found, start = [], 0
    for reference in references:
        end = start + len(reference.tokens)
        found.append(_forced(right[start:end], each[start:end], reference))
        start = end
    return found


def _forced(right: list[bool], each: list[float], reference: Reference) -> Forced:
    """An answer of which it is known whether its tokens were most likely, and their log-probabilities."""
    strings = tuple((all(right[begin:end]), sum(each[begin:end])) for begin, end in reference.spans)
    counted = [right[place] for begin, end in reference.spans for place in range(begin, end)]
    return Forced(strings, sum(counted) / len(counted))


def _batches(job: Job, size: int) -> Iterator[list[int]]:
    """Places of samples whose prompts are equally long, at most ``size`` at once."""
    lengths = sorted({len(sample.tokens) for sample in job.samples})
    for length in lengths:
        alike = [place for place, sample in enumerate(job.samples) if len(sample.tokens) == length]
        for start in range(0, len(alike), size):
            yield alike[start : start + size]
