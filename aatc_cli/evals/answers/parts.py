"""Samples a part at a time: after every part the rows are on disk, so what is cut off goes on where it was.

The first part of every subtask comes before the second of any, so that what is cut off has something of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self, TypeVar

from aatc_cli.console import say
from aatc_cli.evals.answers.ledger import Ledger
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.answers.seen import calibrated_share
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.text.ruler.prompt import Sample

# samples of a part, unless more of them go through the model together
_PART = 20


class Divisible(Protocol):
    """What is asked of every subject, and can be asked a part at a time."""

    @property
    def what(self) -> str:
        """Its name in progress."""
        ...

    @property
    def place(self) -> tuple[str, int | None]:
        """Subtask and context."""
        ...

    @property
    def samples(self) -> Sequence[Sample]:
        """The prompts."""
        ...

    @property
    def prompts(self) -> str:
        """Digest of the whole, whichever part this is."""
        ...

    def part(self, begin: int, end: int) -> Self:
        """The samples from ``begin`` on and before ``end``."""
        ...


J = TypeVar("J", bound=Divisible)


def ask_in_parts(
    opened: Opened, ledger: Ledger, jobs: Sequence[J], ask: Callable[[J, Sequence[Subject]], Iterable[BenchmarkRow]]
) -> None:
    """Ask every subject what is missing of every job.

    ask: gives rows of the subjects given, in their order; each is kept before the next is asked for.
    """
    open_jobs: list[tuple[J, list[Subject]]] = []
    for job in jobs:
        missing = ledger.missing(opened.subjects, *job.place, job.prompts)
        for subject in opened.subjects:
            if subject not in missing:
                say(f"eval: {job.what} of {subject.name} is there already, nothing to do")
        if missing:
            open_jobs.append((job, missing))
    size = max(_PART, opened.options.batch)
    shares: dict[tuple[str, ...], float | None] = {}
    known: dict[str, tuple[str, ...]] = {}

    def stats_of(subject: Subject) -> tuple[str, ...]:
        if subject.plan is None:
            return ()
        if subject.name not in known:
            known[subject.name] = tuple(sorted(subject.plan.transform().manifest.inputs.values()))
        return known[subject.name]

    def share_of(subject: Subject, job: J) -> float | None:
        # plans whose Transforms come of the same Stats were calibrated on the same text
        key = (job.prompts, *stats_of(subject))
        if key not in shares:
            shares[key] = calibrated_share(opened, subject, job.samples, job.what)
        return shares[key]

    for start in range(0, max((len(job.samples) for job, _ in open_jobs), default=0), size):
        for job, missing in open_jobs:
            end = min(start + size, len(job.samples))
            begins = {subject.name: max(ledger.done(subject, *job.place), start) for subject in missing}
            for begin in sorted({begin for begin in begins.values() if begin < end}):
                asked = [subject for subject in missing if begins[subject.name] == begin]
                for subject, row in zip(asked, ask(job.part(begin, end), asked), strict=True):
                    row = row.model_copy(update={"calibration_share": share_of(subject, job)})
                    ledger.extend(subject, row, len(job.samples), job.what)
