"""The two ways to an answer: greedy generation with live caches, or the right one appended and looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from aatc_cli.evals.answers.asking import Asker
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.answers.ledger import score_row
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.ruler.job import Job
from aatc_cli.evals.subjects import Subject

# rows of the subjects given, in their order
Ask = Callable[[Job, Sequence[Subject]], Iterable[BenchmarkRow]]


def asking(opened: Opened, *, forced: bool) -> Ask:
    """One of the two ways; the model is loaded when something is asked."""
    made: list[Ask] = []

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


def forcing(opened: Opened) -> Ask:
    """Answers are appended, subject after subject."""
    forcer = Forcer(opened)

    def ask(job: Job, subjects: Sequence[Subject]) -> Iterator[BenchmarkRow]:
        for _, answers, seconds in forcer.each(job, subjects):
            yield _row(job, [a.score for a in answers], seconds).with_logprobs([a.logprob for a in answers])

    return ask


def _row(job: Job, scores: list[float], seconds: float) -> BenchmarkRow:
    return score_row((job.subtask, job.context, job.metric), scores, job.prompts, seconds)
