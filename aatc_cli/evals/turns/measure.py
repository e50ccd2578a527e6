"""Several turns: how likely the right answer is to every question about the first text, one pass a conversation.

The first turn is one prefill, all behind it is decoded token by token, as the caches of `runtime` do it.
"""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.evals.answers.forced import Forced, Forcer
from aatc_cli.evals.answers.ledger import Ledger, score_row
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.answers.seen import calibrated_share
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.turns.conversation import Conversations, conversations, words_around
from aatc_cli.evals.turns.result import Result
from aatc_cli.evals.turns.settings import Settings
from aatc_cli.evals.windows.frame import check_packed


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject the same conversations, and write a row per turn and context.

    Raises `AatcError` for a context that the model does not have, or that a plan keeps exact.
    """
    words = words_around(settings)
    for context in settings.context:
        for subject in opened.subjects:
            check_packed(subject, context, "--context")
    asked = settings.model_dump(mode="json", exclude={"context", "text"}) | {"text": digest_of(words)}
    names = [f"turn {turn}" for turn in range(1, settings.turns + 1)]
    ledger = Ledger.open(opened, names, forced=True, **asked)
    forcer: Forcer | None = None
    for context in settings.context:
        job = conversations(words, context, settings, opened.tokenizer)
        longest = max(len(s.tokens) + len(r.tokens) for s, r in zip(job.samples, job.references, strict=True))
        opened.check_length(longest, "--context, --turns or --between for")
        missing = _missing(ledger, opened.subjects, names, job)
        for subject in opened.subjects:
            if subject not in missing:
                say(f"eval: {job.what} of {subject.name} is there already, nothing to do")
        if not missing:
            continue
        forcer = forcer or Forcer(opened)
        for subject, answers, seconds in forcer.each(job, missing):
            share = calibrated_share(opened, subject, job.samples, job.what)
            for row in _rows(job, answers, seconds):
                ledger.add(subject, row.model_copy(update={"calibration_share": share}), f"{job.what}, {row.subtask}")
    return [ledger.results[subject.name] for subject in opened.subjects]


def _missing(ledger: Ledger, subjects: Sequence[Subject], names: Sequence[str], job: Conversations) -> list[Subject]:
    found = {subject.name for name in names for subject in ledger.missing(subjects, name, job.context, job.digest)}
    return [subject for subject in subjects if subject.name in found]


def _rows(job: Conversations, answers: Sequence[Forced], seconds: float) -> list[BenchmarkRow]:
    """A row of every turn from the answers of all conversations."""
    turns = len(answers[0].strings)
    rows = []
    for turn in range(turns):
        found = [answer.strings[turn] for answer in answers]
        place = (f"turn {turn + 1}", job.context, "string_match_all")
        row = score_row(place, [float(right) for right, _ in found], job.digest, seconds / turns)
        rows.append(row.with_logprobs([each for _, each in found]))
    return rows
