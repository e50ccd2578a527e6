"""The ways to an answer: greedy generation with live caches or by a server, or the right one appended and looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from aatc_cli.console import progress
from aatc_cli.errors import UsageError
from aatc_cli.evals.answers.asking import Asker
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.answers.ledger import score_row
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.answers.server import Server
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.ruler.job import Job
from aatc_cli.evals.ruler.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.text.ruler.score import score

# rows of the subjects given, in their order
Ask = Callable[[Job, Sequence[Subject]], Iterable[BenchmarkRow]]


def served(opened: Opened, settings: Settings) -> Server:
    """The server that is to answer; raises `UsageError` for what it cannot be asked, `AatcError` as `Server.open`."""
    options, here = opened.options, EvalOptions()
    if settings.mode == "forced":
        raise UsageError("a server generates its answers", "leave out --mode")
    if len(opened.subjects) != 1:
        names = ", ".join(subject.name for subject in opened.subjects)
        raise UsageError(f"a server has one cache, and it would be asked of {names}", "name one by --plan or --recipe")
    for option in ("device", "dtype", "cache"):
        if getattr(options, option) != getattr(here, option):
            raise UsageError(f"--{option} is what the server was started with", "leave it out")
    return Server.open(settings.server or "", opened.subjects[0], opened.source.name)


def asking(opened: Opened, *, forced: bool, server: Server | None) -> Ask:
    """One of the ways; the model is loaded when something is asked that is not asked of a server."""
    made: list[Ask] = [] if server is None else [serving(opened, server)]

    def ask(job: Job, subjects: Sequence[Subject]) -> Iterable[BenchmarkRow]:
        if not made:
            made.append(forcing(opened) if forced else generating(opened))
        return made[0](job, subjects)

    return ask


def generating(opened: Opened) -> Ask:
    """Answers are generated, all subjects at once."""
    asker = Asker(opened)

    def ask(job: Job, subjects: Sequence[Subject]) -> list[BenchmarkRow]:
        answers, seconds = asker.answers(job.what, job.samples, job.metric, job.room, subjects)
        return [_row(job, [answer.score for answer in found], seconds) for found in answers]

    return ask


def serving(opened: Opened, server: Server) -> Ask:
    """Answers are those of a server, as many prompts at once as a batch has."""

    def ask(job: Job, subjects: Sequence[Subject]) -> list[BenchmarkRow]:
        began, scores = time.perf_counter(), []
        pool = ThreadPoolExecutor(opened.options.batch)
        try:
            asked = [pool.submit(server.complete, sample.tokens, job.room) for sample in job.samples]
            with progress(f"eval {job.what}", len(asked)) as ticker:
                for found, sample in zip(asked, job.samples, strict=True):
                    scores.append(score(found.result(), sample.prompt.answers, job.metric))
                    ticker.advance(1)
        finally:
            # of an answer that failed, those that were not begun are not asked any more
            pool.shutdown(wait=False, cancel_futures=True)
        return [_row(job, scores, time.perf_counter() - began) for _ in subjects]

    return ask


def forcing(opened: Opened) -> Ask:
    """Answers are appended, subject after subject."""
    forcer = Forcer(opened)

    def ask(job: Job, subjects: Sequence[Subject]) -> Iterator[BenchmarkRow]:
        for _, answers, seconds in forcer.each(job, subjects):
            yield _row(job, [a.score for a in answers], seconds).with_logprobs([a.logprob for a in answers])

    return ask


def _row(job: Job, scores: list[float], seconds: float) -> BenchmarkRow:
    return score_row((job.subtask, job.context, job.metric), scores, job.prompts, seconds)
