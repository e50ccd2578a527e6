"""What all benchmarks share: results that grow row by row on disk, and rows that need not be run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.evaluation import read_measurement, write_evaluation
from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.run import Run
from aatc_cli.console import say
from aatc_cli.errors import UsageError
from aatc_cli.evals.benchmark import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.subjects import EvalOptions, Subject, origin_of, require_subjects


@dataclass(frozen=True)
class Ledger:
    """The results of one benchmark, of every subject of a call; kept on disk as they come."""

    run: Run
    benchmark: str
    order: tuple[str, ...]
    results: dict[str, BenchmarkResult]

    @classmethod
    def open(
        cls,
        run: Run,
        benchmark: str,
        order: Sequence[str],
        identity: ModelIdentity,
        subjects: Sequence[Subject],
        options: EvalOptions,
    ) -> Ledger:
        """Read what is there of the same plans, model and dtype; ``--force`` begins anew. Raises `ArtifactError`."""
        if not subjects:
            raise UsageError("nothing to evaluate", "name plans by --recipe and --budget, or by --plan")
        require_subjects(identity, subjects)
        results = {}
        for subject in subjects:
            draft = _draft(benchmark, identity, subject, options)
            path = run.evals / draft.file_name
            found = read_measurement(path, BenchmarkResult) if path.is_file() and not options.force else None
            keys = ("plan", "model_fingerprint", "dtype", "simulated")
            same = found is not None and all(getattr(found, key) == getattr(draft, key) for key in keys)
            results[subject.name] = found if found is not None and same else draft
        return cls(run, benchmark, tuple(order), results)

    def missing(self, subjects: Sequence[Subject], subtask: str, context: int | None, prompts: str) -> list[Subject]:
        """Subjects without a row of exactly these prompts."""
        rows = {subject.name: self.results[subject.name].row(subtask, context) for subject in subjects}
        return [s for s in subjects if (row := rows[s.name]) is None or row.prompts_sha256 != prompts]

    def add(self, subject: Subject, row: BenchmarkRow, what: str) -> None:
        """Put a row into the subject's file, and say its score; ``what`` names it."""
        result = self.results[subject.name]
        seconds = sum(old.seconds for old in result.rows if old.place != row.place) + row.seconds
        self._write(subject, result.with_row(row, self.order).model_copy(update={"seconds": seconds}))
        error = "" if row.stderr is None else f" ± {row.stderr:.2g}"
        say(f"eval: {what} of {subject.name}: {row.score:.3g}{error} ({row.samples} samples)")

    def leave_out(self, subjects: Sequence[Subject], reasons: dict[str, str]) -> None:
        """Put the reasons for subtasks that were not run into the files that are there."""
        for subject in subjects:
            result = self.results[subject.name]
            if result.rows and result.left_out != reasons:
                self._write(subject, result.model_copy(update={"left_out": reasons}))

    def _write(self, subject: Subject, result: BenchmarkResult) -> None:
        self.results[subject.name] = result
        write_evaluation(self.run.evals, result)


def _draft(benchmark: str, identity: ModelIdentity, subject: Subject, options: EvalOptions) -> BenchmarkResult:
    return BenchmarkResult(
        benchmark=benchmark,
        seconds=0.0,
        simulated=subject.plan is not None and not subject.recipe.packed,
        **origin_of(subject, identity, options),
    )
