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
    answers: list[str] = Field(description="what was answered, of every sample")

    @classmethod
    def of(cls, context: int, depth: int, wanted: list[str], answers: list[str], scores: list[float]) -> Self:
        """The cell of these answers and what each of them scores."""
        low, high = wilson(scores)
        mean = sum(scores) / len(scores)
        return cls(
            context=context,
            depth=depth,
            samples=len(scores),
            score=mean,
            low=low,
            high=high,
            wanted=wanted,
            answers=answers,
        )


class Result(Measurement):
    """Retrieval of one subject by context and depth."""

    task: Literal["needles"] = "needles"
    simulated: bool = Field(False, description="quantized and decoded at once in an ordinary cache, not packed")
    calibration_share: float | None = Field(
        None, description="share of the prompts' tokens that is calibration text of the plan; null where none can tell"
    )
    cells: list[NeedleCell]

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
