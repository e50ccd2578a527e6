"""What a file of recall holds: what was found at every token of a second mention, and means over parts of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings


class RecallToken(Settings):
    """One token of a second mention. Log-probabilities in nats."""

    window: int
    first: int = Field(description="position of the same token in the first mention")
    again: int = Field(description="position of the token")
    kind: Literal["name", "number"]
    unread: float = Field(description="its log-probability at the first mention, uncompressed: low for what is rare")
    reference: float = Field(description="its log-probability with the uncompressed cache")
    logprob: float = Field(description="the same with the compressed one")
    first_of_reference: bool = Field(description="whether the uncompressed cache makes it the most likely token")
    first_of_all: bool = Field(description="whether the compressed one does")
    agree: bool = Field(description="whether both have the same most likely token")
    classes: list[float] | None = Field(
        None, description="share of the layers and orders that put the first mention into each class; null without"
    )


class RecallRow(Settings):
    """Means over some of the tokens; every standard error is over windows, whose places are not independent."""

    part: str = Field(description="which tokens: all, recalled, names, a range of gaps, a class")
    tokens: float = Field(description="tokens, or the sum of their shares in a class")
    windows: int
    loss: float = Field(description="mean of reference minus compressed log-probability, nats")
    loss_stderr: float | None
    loss_p90: float = Field(description="quantiles of the same over tokens")
    loss_p99: float
    agree: float = Field(description="share with the same most likely token as the uncompressed cache")
    agree_stderr: float | None
    probability: float = Field(description="mean probability of the right token")
    probability_reference: float = Field(description="the same with the uncompressed cache")
    kept: float | None = Field(None, description="of those most likely with the uncompressed cache, share still so")


class Result(Measurement):
    """Recall of one subject on one text."""

    task: Literal["recall"] = "recall"
    text: str
    text_sha256: str
    windows: int
    length: int
    gap: int = Field(description="least tokens between the mentions")
    places: int = Field(description="second mentions")
    calibration_share: float | None = Field(
        None, description="share of the text that is calibration text of the plan; null where none can tell"
    )
    rows: list[RecallRow] = Field(default_factory=list)
    tokens: list[RecallToken] = Field(default_factory=list)

    @property
    def file_name(self) -> str:
        """File the result is stored under."""
        import re

        text = re.sub(r"[^A-Za-z0-9._-]+", "-", self.text).strip("-")
        return f"{self.task}.{self.method}.{text}.{self.length}-{self.gap}{self.stamp}.json"

    def row(self, part: str) -> RecallRow | None:
        """The row of a part, if there is one."""
        return next((row for row in self.rows if row.part == part), None)
