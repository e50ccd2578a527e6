"""References: how likely every token of a written answer is, where a small model's own answers are all wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from aatc_cli.console import say
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.answers.ledger import Ledger, score_row
from aatc_cli.evals.answers.parts import ask_in_parts
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.references.prompts import SUBTASKS, Job, chosen_subtasks, make_job
from aatc_cli.evals.references.result import Result
from aatc_cli.evals.references.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Write the same answers behind the same prompts with every subject's cache, a row per subtask, a part at a time.

    The score is the share of an answer's tokens that are the most likely ones; the log-probability is that of a token.
    Raises `AatcError` where no subtask has its files, or the prompt is too long or too short.
    """
    names = chosen_subtasks(settings.subtask)
    opened.check_length(settings.length + settings.answer, beside=settings.answer)
    for subject in opened.subjects:
        check_packed(subject, settings.length)
    asked = settings.model_dump(mode="json", include={"length", "answer", "limit"})
    ledger = Ledger.open(opened, SUBTASKS, forced=True, **asked)
    jobs, left_out = _jobs(names, opened, settings)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    forcers: list[Forcer] = []

    def ask(job: Job, subjects: Sequence[Subject]) -> Iterator[BenchmarkRow]:
        # the model is opened when something is missing
        if not forcers:
            forcers.append(Forcer(opened))
        counts = [len(reference.tokens) for reference in job.references]
        for _, answers, seconds in forcers[0].each(job, subjects):
            row = score_row((job.subtask, None, "most_likely"), [a.right for a in answers], job.prompts, seconds)
            yield row.with_logprobs([a.logprob / n for a, n in zip(answers, counts, strict=True)])

    ask_in_parts(opened, ledger, jobs, ask)
    ledger.leave_out(opened.subjects, left_out)
    return [ledger.results[subject.name] for subject in opened.subjects]


def _jobs(names: list[str], opened: Opened, settings: Settings) -> tuple[list[Job], dict[str, str]]:
    """The records of every subtask, and the reasons for those that are not there; raises when none is."""
    jobs: list[Job] = []
    left_out: dict[str, str] = {}
    folder = Path(settings.data)
    if not folder.is_dir():
        raise AatcError(f"there is no folder {folder}", "give the folder of benchmark folders by --data")
    for name in names:
        try:
            jobs.append(make_job(name, folder, opened.tokenizer, settings.length, settings.answer, settings.limit))
        except AatcError as error:
            left_out[name] = f"{error.message}; {error.hint}"
            if len(left_out) == len(names):
                raise
    return jobs, left_out
