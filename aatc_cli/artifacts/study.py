"""The result of a study: which evaluation file holds each cell, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from aatc_cli.artifacts.evaluation import SCHEMA_VERSION, read_sealed, write_sealed
from aatc_cli.artifacts.locking import locked
from aatc_cli.artifacts.run import EVALUATION, NAME, Run
from aatc_cli.config import Settings
from aatc_cli.errors import ArtifactError
from aatc_cli.profiles import explain


class StudyRow(Settings):
    """One method at one budget of a study."""

    name: str = Field(description="recipe and what was asked of it: paper-2, paper@2.5 for packed bits, fp16")
    label: str
    recipe: str
    stats: str | None = Field(description="Stats it was calibrated on alone; null for the run's own")
    asked: float | None = Field(description="the budget, or the packed bits that were asked for; null for fp16")
    matched: bool = Field(description="whether packed bits were asked for")
    budget: str | None = Field(None, description="label of the plan's budget; null without a plan")
    plan: str | None = Field(None, description="digest of the plan")
    bits: float | None = Field(None, description="mean code bits per channel")
    bits_packed: float | None = Field(
        None, description="bits of a number of a packed token with all that goes with it; 16 for fp16"
    )
    ratio: float | None = Field(None, description="compression of 8192 tokens, as the paper counts it")
    simulated: bool = Field(False, description="whether its codes are not packed but decoded at once")
    reason: str | None = Field(None, description="why there is no plan")


class StudyCell(Settings):
    """One method on one task and text, or at one context."""

    row: str = Field(description="name of the row")
    task: str
    text: str | None = None
    length: int | None = Field(None, description="tokens per window")
    prompt: int | None = Field(None, description="tokens of a window that are a prompt")
    context: int | None = Field(None, description="tokens of prompt and answer (ruler, turns)")
    mode: str | None = Field(None, description="how answers are had, where it is not by generation")
    subtasks: tuple[str, ...] = Field((), strict=False, description="parts of the benchmark that were asked")
    file: str | None = Field(
        None, pattern=f"^{EVALUATION}$", description="the evaluation's file, from the run directory"
    )
    protocol: str | None = Field(
        None,
        description="digest of the evaluation's protocol, the same in all cells of a column; null before version 3",
    )
    reason: str | None = Field(None, description="why there is no evaluation")
    left_out: dict[str, str] = Field(default_factory=dict, description="parts of a benchmark that were not asked")

    @property
    def place(self) -> tuple[str, str]:
        """What the cell is of; a study has one cell in each place."""
        return self.row, self.column

    @property
    def task_name(self) -> str:
        """What its task is called in the study: ``kl``, ``kl behind 1536``, ``ruler forced``."""
        behind = None if self.prompt is None else f"behind {self.prompt}"
        return " ".join(part for part in (self.task, behind, self.mode) if part is not None)

    @property
    def column(self) -> str:
        """The cell's task in words: ``kl wiki.txt 2048``, ``kl wiki.txt 2048 behind 1536``, ``ruler 4096 forced``."""
        behind = None if self.prompt is None else f"behind {self.prompt}"
        parts = (self.task, self.text, self.length, behind, self.context, self.mode)
        return " ".join(str(part) for part in parts if part is not None)


class StudyResult(Settings):
    """All cells of a study that were run or tried so far."""

    schema_version: Literal[1, 2, 3] = SCHEMA_VERSION
    study: str = Field(pattern=f"^{NAME}$")
    summary: str
    model: str
    model_fingerprint: str
    rows: tuple[StudyRow, ...] = Field((), strict=False)
    cells: tuple[StudyCell, ...] = Field((), strict=False)

    @property
    def missing(self) -> dict[str, int]:
        """Cells without an evaluation by reason, in their order."""
        found: dict[str, int] = {}
        for cell in self.cells:
            if cell.reason is not None:
                found[cell.reason] = found.get(cell.reason, 0) + 1
        return found

    def with_rows(self, rows: list[StudyRow], order: list[tuple[str, str | None]]) -> StudyResult:
        """The same with these rows in place of older ones of their names, and without cells of a plan that changed.

        order: of recipes and Stats, as the study lists them.
        """
        plans = {row.name: (row.plan, row.reason) for row in rows}
        kept = [row for row in self.rows if row.name not in plans]
        changed = {row.name for row in self.rows if row.name in plans and plans[row.name] != (row.plan, row.reason)}
        cells = tuple(cell for cell in self.cells if cell.row not in changed)
        ranks = {place: rank for rank, place in enumerate(order)}
        ranked = sorted([*kept, *rows], key=lambda row: ranks.get((row.recipe, row.stats), len(ranks)))
        return self.model_copy(update={"rows": tuple(ranked), "cells": cells})

    def with_cells(self, cells: list[StudyCell]) -> StudyResult:
        """The same with these cells, each in the place of an older one."""
        places = {cell.place for cell in cells}
        return self.model_copy(update={"cells": (*(c for c in self.cells if c.place not in places), *cells)})


def study_path(root: Path, study: str) -> Path:
    """File of a study's result in the run at ``root``."""
    return Run(root).studies / f"{study}.json"


def write_study(root: Path, result: StudyResult) -> None:
    """Write the result with its digest into the run at ``root``, atomically."""
    write_sealed(study_path(root, result.study), result)


def update_study(
    root: Path, empty: StudyResult, change: Callable[[StudyResult], StudyResult], *, anew: bool = False
) -> StudyResult:
    """``change`` the result on disk, or ``empty`` where there is none, and write it; the new result.

    Several processes may work on one study: each changes what the others have written. Raises `ArtifactError` for a
    result that cannot be read or is of another model, unless ``anew``: then ``empty`` takes its place.
    """
    path = study_path(root, empty.study)
    with locked(path.parent, f".{empty.study}.lock", wait=True):
        found = _found(path, empty, anew=anew)
        result = change(found.model_copy(update={"summary": empty.summary}))
        write_study(root, result)
    return result


def _found(path: Path, empty: StudyResult, *, anew: bool) -> StudyResult:
    if not path.is_file():
        return empty
    try:
        found = read_study(path)
    except ArtifactError:
        if anew:
            return empty
        raise
    if found.model_fingerprint == empty.model_fingerprint:
        return found
    if not anew:
        problem = f"{path} is of the model {found.model}, and {empty.model} with other weights is asked now"
        raise ArtifactError(problem, "use that model or another --run, or add --force to begin the study anew")
    return empty


def read_study(path: Path) -> StudyResult:
    """Read one result; raises `ArtifactError` when the file is not a valid one of this schema."""
    try:
        result = StudyResult.model_validate(read_sealed(path, "run aatc study again with --force"))
    except ValidationError as error:
        problem = f"{path} is not a valid study result: {explain(error)}"
        raise ArtifactError(problem, "run aatc study again with --force") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "run aatc study again with --force") from error
    if result.study != path.stem:
        problem = f"{path} is not a valid study result: it is one of the study {result.study}"
        raise ArtifactError(problem, "run aatc study again with --force")
    return result


def read_studies(root: Path) -> list[StudyResult]:
    """All study results of the run at ``root``, in name order."""
    return [read_study(path) for path in sorted(Run(root).studies.glob("*.json"))]
