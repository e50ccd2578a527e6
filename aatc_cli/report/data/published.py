"""Figures that the paper gives for its two models, to stand beside measured ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import Field

from aatc_cli.config import Settings
from aatc_cli.profiles import profiles_dir


class PublishedRow(Settings):
    """One method at one budget. ``scores`` by column: ``longbench``, ``longbench trec``, ``ruler 4096``, ``gsm8k``."""

    recipe: str
    budget: str | None = None
    ratio: float = Field(description="the paper's column Comp.")
    source: str = Field(description="the paper's table")
    scores: dict[str, float]


class Published(Settings):
    """What the paper gives for one model."""

    model: str = Field(description="hub id; a folder of the same name is taken for the same model")
    source: str
    rows: tuple[PublishedRow, ...] = Field(strict=False)

    def score(self, recipe: str, budget: str | None, column: str) -> float | None:
        """A published score, None where the paper has none; of two tables the first named counts."""
        return next(
            (
                row.scores[column]
                for row in self.rows
                if (row.recipe, row.budget) == (recipe, budget) and column in row.scores
            ),
            None,
        )


def published_for(model: str) -> Published | None:
    """The paper's figures for ``model`` (a hub id, or the name of its folder); None for a model that is not in it."""
    for path in sorted((profiles_dir() / "published").glob("*.toml")):
        found = read_published(path)
        if model.rpartition("/")[2] == found.model.rpartition("/")[2]:
            return found
    return None


def read_published(path: Path) -> Published:
    """Read one file of published figures."""
    return Published.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
