"""What a file of accumulate holds: for every way of writing, how far the live cache is from the uncompressed model."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings
from aatc_cli.evals.accumulate.settings import Way

# parts of the decoded tokens whose KL stands apart, to see it grow
STRETCHES = 4


class AccumulateRow(Settings):
    """All decoded positions of all windows, one way. KL is KL(uncompressed || live) in nats a token."""

    way: Way
    tokens: int = Field(description="positions scored, of all windows")
    kl_mean: float
    kl_stderr: float | None = Field(description="over windows")
    kl_windows: list[float] = Field(description="mean of every window")
    kl_p50: float
    kl_p90: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    stretches: list[float] = Field(description="mean KL of the first, second, ... part of the decoded tokens")
    top1: float = Field(description="share of positions with the same most likely token")
    nll: float = Field(description="of the tokens written, with the live cache, nats a token")
    nll_uncompressed: float = Field(description="of the same tokens, uncompressed")
    nll_change: float = Field(description="nll less nll_uncompressed")
    nll_change_stderr: float | None = Field(description="over windows")


class Result(Measurement):
    """One subject on one text, with a live cache."""

    task: Literal["accumulate"] = "accumulate"
    simulated: bool = Field(False, description="quantized and decoded at once in an ordinary cache, not packed")
    text: str
    text_sha256: str
    windows: int
    prompt: int = Field(description="tokens that entered the cache in one prefill")
    decoded: int = Field(description="tokens that were fed one by one")
    calibration_share: float | None = Field(
        None, description="share of the text that is calibration text of the plan; null where none can tell"
    )
    rows: list[AccumulateRow] = Field(default_factory=list)

    @property
    def file_name(self) -> str:
        """File the result is stored under."""
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", self.text).strip("-")
        return f"{self.task}.{self.method}.{text}.{self.prompt}-{self.decoded}{self.stamp}.json"

    def row(self, way: str) -> AccumulateRow | None:
        """The row of a way, if there is one."""
        return next((row for row in self.rows if row.way == way), None)
