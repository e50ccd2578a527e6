"""Run: a directory, and the places of the artifacts in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aatc_cli.artifacts.disk import within
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.manifest import MANIFEST
from aatc_cli.config import Budget
from aatc_cli.errors import ArtifactError, UsageError

# of everything that is named: no slash, nothing hidden
NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
# of an evaluation in the run, or in that of Stats of a study
EVALUATION = rf"(studies/{NAME}/)?evals/{NAME}\.json"
_FOLDERS = ("transforms", "plans", "evals", "report", "stability", "studies")


@dataclass(frozen=True)
class Run:
    """A run directory and the places of its artifacts."""

    root: Path

    def stats(self, name: str = "stats") -> Path:
        """Directory of the Stats called ``name``; raises `UsageError` for a name that leads elsewhere."""
        if name in _FOLDERS or re.fullmatch(NAME, name) is None:
            raise UsageError(
                f"{name!r} cannot be the name of Stats",
                f"use letters, digits, '.', '_', '+' and '-', and none of {', '.join(_FOLDERS)}",
            )
        return self._own(self.root / name)

    def all_stats(self) -> list[Path]:
        """Directories of all finished Stats, in name order."""
        found = [path for path in _visible(self.root) if path.name not in _FOLDERS and (path / MANIFEST).is_file()]
        return [self._own(path) for path in found]

    def checkpoint(self, name: str) -> Path:
        """Directory of the checkpoint of the Stats called ``name``."""
        return self._own(self.root / f".{name}.partial")

    def transform(self, name: str) -> Path:
        """Directory of a Transform by its name (`methods.recipe.transform_name`: "whiten", "metric-keys-per-head")."""
        return self._own(self.root / "transforms" / _named(name))

    def transforms(self) -> list[Path]:
        """Directories of all transforms, in name order."""
        return [self._own(path) for path in _visible(self.root / "transforms")]

    def plan(self, recipe: str, budget: Budget) -> Path:
        """Directory of the Plan of a recipe at a budget."""
        return self._own(self.root / "plans" / _named(f"{recipe}-{budget.label}"))

    def plans(self) -> list[Path]:
        """Directories of all plans, in name order."""
        return [self._own(path) for path in _visible(self.root / "plans")]

    @property
    def studies(self) -> Path:
        """Folder of the results of studies."""
        return self._own(self.root / "studies")

    def within(self, folder: Literal["stability", "studies"], stats: str) -> Run:
        """The run of artifacts made from the Stats called ``stats`` alone, for a comparison or a study."""
        return Run(self._own(self.root / folder / _named(stats)))

    @property
    def evals(self) -> Path:
        """Folder of the evaluation files."""
        return self._own(self.root / "evals")

    def evaluation(self, name: str) -> Path:
        """The evaluation file that a study calls by its path from here; raises `ArtifactError` for any other file."""
        if re.fullmatch(EVALUATION, name) is None:
            raise ArtifactError(f"{name!r} is no evaluation of the run {self.root}", "run the study again with --force")
        return self._own(self.root / name)

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self._own(self.root / "report")

    def _own(self, path: Path) -> Path:
        """``path``; raises `ArtifactError` when it is not of the run, or a part of it is a symbolic link."""
        return within(self.root, path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; raises `AatcError` naming the process that already does."""
        with locked(self.root, wait=False):
            for folder in (self.root, self._own(self.root / "plans"), self._own(self.root / "transforms")):
                sweep(folder)
            yield


def _named(name: str) -> str:
    if re.fullmatch(NAME, name) is None:
        raise ArtifactError(f"{name!r} cannot be the name of an artifact", "use letters, digits, '.', '_', '+' and '-'")
    return name


def _visible(folder: Path) -> list[Path]:
    """What lies in ``folder``, in name order, without the temporary directories of a writer at work."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
