"""The one figure of a study's cell: KL, perplexity or loss on a text, the mean score of a benchmark's parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from aatc_cli.artifacts.evaluation import Evaluation, Measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell
from aatc_cli.evals.accumulate.result import Result as AccumulateResult
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.needles.result import Result as NeedleResult
from aatc_cli.evals.reading import read_result
from aatc_cli.evals.recall.result import Result as RecallResult


@dataclass(frozen=True)
class Score:
    """A mean and its standard error, None where one sample or window gives none."""

    mean: float
    stderr: float | None

    @property
    def text(self) -> str:
        """Three digits, with the error where there is one."""
        return f"{self.mean:.3g}" if self.stderr is None else f"{self.mean:.3g} ± {self.stderr:.2g}"


def cell_evaluation(root: Path, cell: StudyCell) -> Measurement | None:
    """What the cell's file holds; None where there is no file. Raises `ArtifactError` for one that is damaged."""
    path = Run(root).evaluation(cell.file) if cell.file else None
    if path is None or not path.is_file():
        return None
    return read_result(path)


def rows_of(cell: StudyCell, result: BenchmarkResult) -> list[BenchmarkRow]:
    """The rows of a benchmark's file that belong to the cell."""
    return [
        row
        for row in result.rows
        if row.context == cell.context
        and (not cell.subtasks or any(fnmatchcase(row.subtask, pattern) for pattern in cell.subtasks))
    ]


def mean_of_rows(rows: list[BenchmarkRow]) -> Score | None:
    """Mean score of parts and its error, their samples being different ones; None without rows."""
    if not rows:
        return None
    errors = [row.stderr for row in rows]
    known = [error for error in errors if error is not None]
    stderr = math.sqrt(math.fsum(error**2 for error in known)) / len(rows) if len(known) == len(rows) else None
    return Score(math.fsum(row.score for row in rows) / len(rows), stderr)


def cell_score(root: Path, cell: StudyCell) -> Score | None:
    """The cell's figure; None where it is missing."""
    found = cell_evaluation(root, cell)
    if found is None:
        return None
    if isinstance(found, BenchmarkResult):
        return mean_of_rows(rows_of(cell, found))
    if isinstance(found, NeedleResult):
        cells = found.cells
        return Score(math.fsum(cell.score for cell in cells) / len(cells), None) if cells else None
    if isinstance(found, RecallResult):
        row = found.row("recalled") or found.row("all")
        return None if row is None else Score(row.loss, row.loss_stderr)
    if isinstance(found, AccumulateResult):
        written = found.rows[0] if found.rows else None
        return None if written is None else Score(written.kl_mean, written.kl_stderr)
    if not isinstance(found, Evaluation):
        return None
    if found.perplexity is not None:
        return Score(found.perplexity, found.perplexity_stderr)
    return None if found.kl_mean is None else Score(found.kl_mean, found.kl_stderr)
