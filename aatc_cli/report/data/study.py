"""A study as a report sees it: its rows, the figure of every cell, and why a cell has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aatc_cli.artifacts.evaluation import Evaluation, Measurement
from aatc_cli.artifacts.study import StudyCell, StudyResult, StudyRow
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.study_scores import rows_of
from aatc_cli.report.data.published import Published

# what the paper averages in LongBench
AVERAGED = ("triviaqa", "qasper", "trec", "samsum", "lcc", "repobench-p", "qmsum")
_GONE = "its file is no longer in the run; run the study again"


@dataclass(frozen=True)
class StudyView:
    """A study's result with the evaluations of its cells by file, and the paper's figures where the model is its."""

    result: StudyResult
    found: Mapping[str, Measurement]
    published: Published | None = None

    def cells(self, task: str) -> list[StudyCell]:
        """Cells of one task in their order."""
        return [cell for cell in self.result.cells if cell.task == task]

    def window(self, cell: StudyCell) -> Evaluation | None:
        """The evaluation on text of a cell; None where it is missing."""
        found = self.found.get(cell.file or "")
        return found if isinstance(found, Evaluation) else None

    def benchmark_rows(self, cell: StudyCell, subtask: str | None = None) -> list[BenchmarkRow]:
        """Rows of a benchmark's cell, of one ``subtask`` or all; none where it is missing."""
        found = self.found.get(cell.file or "")
        rows = rows_of(cell, found) if isinstance(found, BenchmarkResult) else []
        return [row for row in rows if subtask is None or row.subtask == subtask]

    def measured(self, task: str) -> list[Measurement]:
        """Results of a task's cells that are there, in their order."""
        return [found for cell in self.cells(task) if (found := self.found.get(cell.file or "")) is not None]

    def reason(self, cell: StudyCell | None) -> str:
        """Why a cell shows nothing."""
        if cell is None:
            return "not run yet; run the study again"
        return cell.reason or "; ".join(f"{name}: {why}" for name, why in cell.left_out.items()) or _GONE


def title_of(row: StudyRow) -> str:
    """What a row is called in tables: label, budget (after @ packed bits that were asked for), kind of cache."""
    bits = "" if row.asked is None else f" {'@' if row.matched else ''}{row.asked:g}"
    return f"{row.label}{bits}{' (simulated)' if row.simulated else ''}"
