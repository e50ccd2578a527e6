"""What all benchmarks share: results that grow row by row on disk, and rows that need not be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.locking import locked
from aatc_cli.artifacts.run import Run
from aatc_cli.console import say
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.errors import SettingsMismatchError
from aatc_cli.evals.answers.interval import wilson
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.caches import cache_kind
from aatc_cli.evals.keeping import already, found_before
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject


@dataclass(frozen=True)
class Ledger:
    """The results of one benchmark, of every subject of a call; kept on disk as they come.

    anew: subjects whose file is to be begun anew by the next row.
    """

    run: Run
    benchmark: str
    order: tuple[str, ...]
    results: dict[str, BenchmarkResult]
    anew: set[str] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        opened: Opened,
        order: Sequence[str],
        *,
        forced: bool = False,
        server: dict[str, Any] | None = None,
        **asked: Any,
    ) -> Ledger:
        """Read what is there of the same plans and protocol; ``--force`` begins anew.

        forced: answers are appended and not generated, which is another benchmark, without a cache. server: what a
        server that answers says of itself, which is another one too: its device and dtype are its own. asked: all that
        the prompts of every subtask are made from. Raises `SettingsMismatchError` for results of other plans.
        """
        results, name = {}, opened.task + ("-forced" if forced else "-served" if server else "")
        elsewhere = {"device": "server", "dtype": "server"} if server else {}
        for subject in opened.subjects:
            kind = None if forced else "server" if server else cache_kind(subject, opened.options)
            protocol = opened.protocol(tokenizer=opened.identity.tokenizer_hash, **asked) | elsewhere
            draft = BenchmarkResult(
                benchmark=name,
                seconds=0.0,
                cache=kind,
                simulated=kind == "simulated",
                # answers are read back as text, so the whole tokenizer counts and not the prompts' tokens alone
                protocol=protocol | ({"server": server} if server else {}),
                **(opened.origin(subject) | elsewhere),
            )
            results[subject.name] = found_before(opened, draft) or draft
        anew = set(results) if opened.options.force else set()
        return cls(opened.run, name, tuple(order), results, anew)

    def missing(self, subjects: Sequence[Subject], subtask: str, context: int | None, prompts: str) -> list[Subject]:
        """Subjects without this row, or with a part of it; raises `SettingsMismatchError` for one of other prompts."""
        found = []
        for subject in subjects:
            row = self.results[subject.name].row(subtask, context)
            if row is None or (not row.whole and row.prompts_sha256 == prompts):
                found.append(subject)
            elif row.prompts_sha256 != prompts:
                path = self.run.evals / self.results[subject.name].file_name
                raise SettingsMismatchError(
                    f"{path} has {subtask} with other prompts: they were {row.prompts_sha256[:12]}, now {prompts[:12]}",
                    "add --force to begin the file anew, or use another --run",
                )
        return found

    def done(self, subject: Subject, subtask: str, context: int | None) -> int:
        """Samples of a row that were asked, in their order."""
        row = self.results[subject.name].row(subtask, context)
        return 0 if row is None else row.samples

    def extend(self, subject: Subject, row: BenchmarkRow, asked: int, what: str) -> None:
        """Put the next samples of a row of ``asked`` behind those that are there."""
        old = self.results[subject.name].row(row.subtask, row.context)
        if old is not None and old.scores is not None and row.scores is not None:
            joined = score_row(row.place, [*old.scores, *row.scores], row.prompts_sha256, old.seconds + row.seconds)
            if old.logprobs is not None and row.logprobs is not None:
                joined = joined.with_logprobs([*old.logprobs, *row.logprobs])
            row = joined.model_copy(update={"calibration_share": row.calibration_share})
        left = None if row.samples >= asked else asked
        self.add(subject, row.model_copy(update={"asked": left}), what)

    def add(self, subject: Subject, row: BenchmarkRow, what: str) -> None:
        """Put a row into the subject's file, and say its score; ``what`` names it."""

        def change(result: BenchmarkResult) -> BenchmarkResult:
            seconds = sum(old.seconds for old in result.rows if old.place != row.place) + row.seconds
            return result.with_row(row, self.order).model_copy(update={"seconds": seconds})

        self._update(subject, change)
        samples = f"{row.samples} samples" if row.asked is None else f"{row.samples} of {row.asked} samples"
        between = "" if row.low is None or row.high is None else f" ({row.low:.3g} to {row.high:.3g})"
        say(f"eval: {what} of {subject.name}: {row.score:.3g}{between}, {samples}")

    def leave_out(self, subjects: Sequence[Subject], reasons: dict[str, str]) -> None:
        """Put the reasons for subtasks that were not run into the files that are there."""
        for subject in subjects:
            result = self.results[subject.name]
            if result.rows and result.left_out != reasons:
                self._update(subject, lambda found: found.model_copy(update={"left_out": reasons}))

    def _update(self, subject: Subject, change: Callable[[BenchmarkResult], BenchmarkResult]) -> None:
        """Change the subject's file as it is now: another process may have put rows into it meanwhile."""
        mine = self.results[subject.name]
        with locked(self.run.evals, f".{mine.file_name}.lock", wait=True):
            # with --force the first row of this call replaces the file that was there before it
            there = already(self.run.evals, mine, force=subject.name in self.anew)
            self.anew.discard(subject.name)
            self.results[subject.name] = change(there or mine)
            write_evaluation(self.run.evals, self.results[subject.name])


def score_row(place: tuple[str, int | None, str], scores: list[float], prompts: str, seconds: float) -> BenchmarkRow:
    """The row of a (subtask, context, metric) from the scores of its samples."""
    subtask, context, metric = place
    mean, stderr = mean_and_stderr(scores)
    low, high = wilson(scores)
    return BenchmarkRow(
        subtask=subtask,
        context=context,
        metric=metric,
        score=mean,
        stderr=stderr,
        low=low,
        high=high,
        samples=len(scores),
        scores=scores,
        prompts_sha256=prompts,
        seconds=seconds,
    )
