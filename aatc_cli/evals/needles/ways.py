"""The two ways to an answer about a needle: greedy generation with live caches, or the right one appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aatc_cli.evals.answers.asking import Asker, prompt_tokens
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.needles.prompts import ROOM
from aatc_cli.evals.needles.result import NeedleCell
from aatc_cli.evals.needles.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.text.ruler.prompt import Prompt, Reference, Sample, reference_of

# cells of the subjects given, in their order, and seconds of each
Ask = Callable[["Cell", Sequence[Subject]], list[tuple[NeedleCell, float]]]


@dataclass(frozen=True)
class Cell:
    """The needles at one place of the map, and how their answers are written."""

    place: tuple[int, int]
    samples: list[Sample]
    references: list[Reference]

    @property
    def what(self) -> str:
        """Its name in progress."""
        return f"needles at {self.place[0]} tokens, {self.place[1]} %"

    @property
    def wanted(self) -> list[str]:
        """The number that was hidden, of every sample."""
        return [sample.prompt.answers[0] for sample in self.samples]


def references_of(opened: Opened, samples: Sequence[Sample], settings: Settings) -> list[Reference]:
    """How the answers are written; raises `AatcError` for a tokenizer that joins prompt and answer."""

    def encode(prompt: Prompt) -> list[int]:
        return prompt_tokens(opened.tokenizer, prompt, chat=settings.chat)

    return [reference_of(sample, ", ", encode, opened.tokenizer.raw.decode) for sample in samples]


def generating(opened: Opened) -> Ask:
    """Answers are generated, all subjects at once."""
    asker = Asker(opened)

    def ask(cell: Cell, subjects: Sequence[Subject]) -> list[tuple[NeedleCell, float]]:
        found, seconds = asker.answers(cell.what, cell.samples, "string_match_all", ROOM, subjects)
        return [
            (NeedleCell.of(cell.place, cell.wanted, [a.score for a in answers], [a.text for a in answers]), seconds)
            for answers in found
        ]

    return ask


def forcing(opened: Opened) -> Ask:
    """Answers are appended."""
    forcer = Forcer(opened)

    def ask(cell: Cell, subjects: Sequence[Subject]) -> list[tuple[NeedleCell, float]]:
        return [
            (
                NeedleCell.of(cell.place, cell.wanted, [a.score for a in answers], [], [a.logprob for a in answers]),
                seconds,
            )
            for answers, seconds in zip(*forcer.answers(cell, subjects), strict=True)
        ]

    return ask
