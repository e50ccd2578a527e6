"""Retrieval by context and depth: one needle, one question, and what every subject answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.errors import UsageError
from aatc_cli.evals.answers.asking import Asker, prompt_tokens
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.caches import cache_kind
from aatc_cli.evals.keeping import already
from aatc_cli.evals.needles.prompts import ROOM, Grid, needle_grid
from aatc_cli.evals.needles.result import NeedleCell, Result
from aatc_cli.evals.needles.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.evals.windows.seen import seen_of_prompts
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


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject for the needle at every depth of every context, and write a file each, cell by cell.

    Cells of the same plan, model and prompts are not asked again. Raises `AatcError` for a context that the model does
    not have, or that a plan keeps exact, and `UsageError` for a cache that forced answers do not fill.
    """
    forced = settings.mode == "forced"
    if forced and opened.options.cache != "auto":
        raise UsageError("forced answers are read without a cache", "leave out --cache, or use --mode generate")
    for context in settings.context:
        opened.check_length(context, "--context")
        for subject in opened.subjects:
            check_packed(subject, context - ROOM, "--context")
    grid = needle_grid(opened.tokenizer, settings)
    drafts = [_draft(opened, subject, grid, settings) for subject in opened.subjects]
    force = opened.options.force
    results = [already(opened.run.evals, draft, force=force) or draft for draft in drafts]
    for subject, result in zip(opened.subjects, results, strict=True):
        if len(result.cells) == len(grid):
            say(f"eval: needles of {subject.name} is there already, nothing to do")
    ask: Ask | None = None
    for place, samples in grid.items():
        missing = [index for index, result in enumerate(results) if result.cell(*place) is None]
        if not missing:
            continue
        ask = ask or (_forcing(opened) if forced else _generating(opened))
        cell = Cell(place, samples, _references(opened, samples, settings) if forced else [])
        for index, (found, seconds) in zip(missing, ask(cell, [opened.subjects[i] for i in missing]), strict=True):
            grown = results[index].with_cell(found)
            results[index] = grown.model_copy(update={"seconds": grown.seconds + seconds})
            path = write_evaluation(opened.run.evals, results[index])
            if len(results[index].cells) == len(grid):
                say(f"eval: needles of {opened.subjects[index].name} -> {path}")
    return results


def _draft(opened: Opened, subject: Subject, grid: Grid, settings: Settings) -> Result:
    """The result before anything is asked."""
    forced = settings.mode == "forced"
    kind = None if forced else cache_kind(subject, opened.options)
    prompts = [[place, [[s.tokens, s.prompt.answers] for s in samples]] for place, samples in grid.items()]
    asked = {"cells": [list(place) for place in grid], "prompts": digest_of(prompts), "room": ROOM}
    asked |= {"chat": settings.chat, **({"mode": "forced"} if forced else {})}
    share = None
    if subject.plan is not None:
        tokens = [sample.tokens for samples in grid.values() for sample in samples]
        share = seen_of_prompts(subject.plan, tokens, opened.tokenizer.bos)
    if share:
        say(f"eval: {share:.0%} of the needles' prompts is calibration text of {subject.name}: its scores flatter it")
    return Result(
        **opened.origin(subject),
        calibration_share=share,
        cache=kind,
        simulated=kind == "simulated",
        forced=forced,
        protocol=opened.protocol(tokenizer=opened.identity.tokenizer_hash, **asked),
        seconds=0.0,
        cells=[],
    )


def _references(opened: Opened, samples: Sequence[Sample], settings: Settings) -> list[Reference]:
    """How the answers are written; raises `AatcError` for a tokenizer that joins prompt and answer."""

    def encode(prompt: Prompt) -> list[int]:
        return prompt_tokens(opened.tokenizer, prompt, chat=settings.chat)

    return [reference_of(sample, ", ", encode, opened.tokenizer.raw.decode) for sample in samples]


def _generating(opened: Opened) -> Ask:
    """Answers are generated, all subjects at once."""
    asker = Asker(opened)

    def ask(cell: Cell, subjects: Sequence[Subject]) -> list[tuple[NeedleCell, float]]:
        found, seconds = asker.answers(cell.what, cell.samples, "string_match_all", ROOM, subjects)
        return [
            (NeedleCell.of(cell.place, cell.wanted, [a.score for a in answers], [a.text for a in answers]), seconds)
            for answers in found
        ]

    return ask


def _forcing(opened: Opened) -> Ask:
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
