"""What was measured in a run: its evaluations by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.artifacts.evaluation import Evaluation, read_measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import Result as NeedleResult
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.evals.recall.result import Result as RecallResult
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.table import read_speed
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.result import read_stability


@dataclass(frozen=True)
class Measured:
    """Every evaluation of a run, each kind in the order of its files' names."""

    evaluations: tuple[Evaluation, ...]
    stability: tuple[StabilityResult, ...]
    speed: tuple[SpeedResult, ...]
    memory: tuple[MemoryResult, ...]
    answers: tuple[BenchmarkResult, ...]
    needles: tuple[NeedleResult, ...]
    recall: tuple[RecallResult, ...]

    @classmethod
    def of(cls, run: Run) -> Measured:
        """Read them all; raises `ArtifactError` for one that is damaged."""
        evals = run.evals
        return cls(
            tuple(read_evaluations(evals)) if evals.is_dir() else (),
            tuple(read_stability(evals)),
            tuple(read_speed(evals)),
            tuple(read_measurement(path, MemoryResult) for path in sorted(evals.glob("memory.*.json"))),
            tuple(read_measurement(path, BenchmarkResult) for path in sorted(evals.glob("benchmark.*.json"))),
            tuple(read_measurement(path, NeedleResult) for path in sorted(evals.glob("needles.*.json"))),
            tuple(read_measurement(path, RecallResult) for path in sorted(evals.glob("recall.*.json"))),
        )

    @property
    def models(self) -> list[str]:
        """Names of the models that were measured."""
        kinds = (self.evaluations, self.stability, self.speed, self.memory, self.answers, self.needles, self.recall)
        results: list[Any] = [result for kind in kinds for result in kind]
        return sorted({result.model for result in results})
