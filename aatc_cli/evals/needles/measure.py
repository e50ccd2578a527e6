"""Retrieval by context and depth: one needle, one question, and what every subject answers."""

from __future__ import annotations

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.errors import UsageError
from aatc_cli.evals.caches import cache_kind
from aatc_cli.evals.keeping import found_before
from aatc_cli.evals.needles.prompts import ROOM, Grid, needle_grid
from aatc_cli.evals.needles.result import Result
from aatc_cli.evals.needles.settings import Settings
from aatc_cli.evals.needles.ways import Ask, Cell, forcing, generating, references_of
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.evals.windows.seen import seen_of_prompts


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
    results = [found_before(opened, draft) or draft for draft in drafts]
    for subject, result in zip(opened.subjects, results, strict=True):
        if len(result.cells) == len(grid):
            say(f"eval: needles of {subject.name} is there already, nothing to do")
    ask: Ask | None = None
    for place, samples in grid.items():
        missing = [index for index, result in enumerate(results) if result.cell(*place) is None]
        if not missing:
            continue
        ask = ask or (forcing(opened) if forced else generating(opened))
        cell = Cell(place, samples, references_of(opened, samples, settings) if forced else [])
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
