"""What a file of needles holds: a cell for every context and depth, with what was answered."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings
from aatc_cli.evals.answers.interval import wilson


class NeedleCell(Settings):
    """Needles at one depth of one context."""

    context: int = Field(description="tokens of prompt and answer")
    depth: int = Field(description="place of the needle in the text, in percent")
    samples: int
    score: float = Field(description="share of the needles that were found")
    low: float = Field(description="lower end of the 95 % interval (Wilson)")
    high: float = Field(description="upper end of the same interval")
    wanted: list[str] = Field(description="the number that was hidden, of every sample")
    answers: list[str] = Field(description="what was answered, of every sample; none of forced answers")
    logprobs: list[float] | None = Field(
        None, description="of forced answers, log-probability of the right one of every sample, nats"
    )

    @classmethod
    def of(
        cls,
        place: tuple[int, int],
        wanted: list[str],
        scores: list[float],
        answers: list[str],
        logprobs: list[float] | None = None,
    ) -> Self:
        """The cell at a place (context, depth) of answers that score this much each."""
        low, high = wilson(scores)
        mean = sum(scores) / len(scores)
        return cls(
            context=place[0],
            depth=place[1],
            samples=len(scores),
            score=mean,
            low=low,
            high=high,
            wanted=wanted,
            answers=answers,
            logprobs=logprobs,
        )


class Result(Measurement):
    """Retrieval of one subject by context and depth."""

    task: Literal["needles"] = "needles"
    simulated: bool = Field(False, description="quantized and decoded at once in an ordinary cache, not packed")
    forced: bool = Field(False, description="answers were appended and looked at, not generated")
    calibration_share: float | None = Field(
        None, description="share of the prompts' tokens that is calibration text of the plan; null where none can tell"
    )
    cells: list[NeedleCell]

    def cell(self, context: int, depth: int) -> NeedleCell | None:
        """The cell at a place, if it is there."""
        return next((cell for cell in self.cells if (cell.context, cell.depth) == (context, depth)), None)

    def with_cell(self, cell: NeedleCell) -> Result:
        """The same result with one more cell, by context and depth."""
        cells = sorted([*self.cells, cell], key=lambda each: (each.context, each.depth))
        return self.model_copy(update={"cells": cells})

    @property
    def contexts(self) -> list[int]:
        """Columns of the heat map."""
        return sorted({cell.context for cell in self.cells})

    @property
    def depths(self) -> list[int]:
        """Rows of the heat map."""
        return sorted({cell.depth for cell in self.cells})

    @property
    def heat(self) -> list[list[float | None]]:
        """Scores by depth and context; None where a cell is missing."""
        found = {(cell.depth, cell.context): cell.score for cell in self.cells}
        return [[found.get((depth, context)) for context in self.contexts] for depth in self.depths]
