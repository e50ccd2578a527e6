"""Retrieval by context and depth: one needle, one question, and what every subject answers."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.evals.answers.asking import Answer, Asker
from aatc_cli.evals.caches import cache_kind
from aatc_cli.evals.keeping import already
from aatc_cli.evals.needles.prompts import ROOM, Grid, needle_grid
from aatc_cli.evals.needles.result import NeedleCell, Result
from aatc_cli.evals.needles.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.evals.windows.seen import seen_of_prompts
from aatc_cli.text.ruler.prompt import Sample


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject for the needle at every depth of every context, and write a file each.

    Raises `AatcError` for a context that the model does not have, or that a plan keeps exact.
    """
    for context in settings.context:
        opened.check_length(context, "--context")
        for subject in opened.subjects:
            check_packed(subject, context - ROOM, "--context")
    grid = needle_grid(opened.tokenizer, settings)
    drafts = {subject.name: _draft(opened, subject, grid, chat=settings.chat) for subject in opened.subjects}
    force = opened.options.force
    found = {name: already(opened.run.evals, draft, force=force) for name, draft in drafts.items()}
    missing = [subject for subject in opened.subjects if found[subject.name] is None]
    for subject in opened.subjects:
        if subject not in missing:
            say(f"eval: needles of {subject.name} is there already, nothing to do")
    if missing:
        for subject, result in zip(missing, _asked(opened, missing, drafts, grid), strict=True):
            say(f"eval: needles of {subject.name} -> {write_evaluation(opened.run.evals, result)}")
            found[subject.name] = result
    return [result for result in found.values() if result is not None]


def _draft(opened: Opened, subject: Subject, grid: Grid, *, chat: bool) -> Result:
    """The result before anything is asked."""
    kind = cache_kind(subject, opened.options)
    prompts = [[place, [[s.tokens, s.prompt.answers] for s in samples]] for place, samples in grid.items()]
    asked = {"cells": [list(place) for place in grid], "prompts": digest_of(prompts), "room": ROOM, "chat": chat}
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
        protocol=opened.protocol(tokenizer=opened.identity.tokenizer_hash, **asked),
        seconds=0.0,
        cells=[],
    )


def _asked(opened: Opened, subjects: Sequence[Subject], drafts: dict[str, Result], grid: Grid) -> list[Result]:
    asker = Asker(opened)
    results = [drafts[subject.name] for subject in subjects]
    for (context, depth), samples in grid.items():
        what = f"needles at {context} tokens, {depth} %"
        answers, seconds = asker.answers(what, samples, "string_match_all", ROOM, subjects)
        cells = [_cell(context, depth, samples, mine) for mine in answers]
        results = [
            result.model_copy(update={"cells": [*result.cells, cell], "seconds": result.seconds + seconds})
            for result, cell in zip(results, cells, strict=True)
        ]
    return results


def _cell(context: int, depth: int, samples: Sequence[Sample], answers: Sequence[Answer]) -> NeedleCell:
    wanted = [sample.prompt.answers[0] for sample in samples]
    texts, scores = [answer.text for answer in answers], [answer.score for answer in answers]
    return NeedleCell.of(context, depth, wanted, texts, scores)
