"""How much a method owes to the very windows it was calibrated on: plans of several Stats, side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement, read_measurement
from aatc_cli.config import Settings


class StabilityRow(Settings):
    """The plan of one Stats on one text."""

    stats: str = Field(description="name of the Stats it was calibrated on")
    stats_digest: str
    plan: str | None = Field(None, description="digest of the plan that was made of them")
    calibration: list[str] = Field(description="texts of the Stats")
    text: str
    text_sha256: str
    calibration_share: float | None = Field(None, description="share of the text that is calibration text of the Stats")
    bits: float
    kl_mean: float = Field(description="KL(reference || compressed), nats per token")
    kl_stderr: float | None
    kl_windows: list[float] | None = Field(None, description="mean KL of every window, by which plans are paired")
    predicted: float | None = Field(description="KL to second order by the Stats' own loss gradients")
    predicted_elsewhere: float | None = Field(description="the same by the gradients of the other Stats, on average")


class Result(Measurement):
    """Plans of one recipe at one budget, each calibrated on Stats of its own, on the same texts."""

    task: Literal["stability"] = "stability"
    length: int = Field(description="tokens per window")
    first_position: int = Field(description="first position of a window that is scored")
    windows: list[int] = Field(description="windows of every text")
    rows: list[StabilityRow]
    kl_spread: dict[str, float] = Field(description="by text, the largest KL over the smallest")

    @property
    def file_name(self) -> str:
        """File the result is stored under: task, recipe, budget, Stats and protocol."""
        names = "-".join(dict.fromkeys(re.sub(r"[^A-Za-z0-9._-]+", "-", row.stats) for row in self.rows))
        return f"{self.task}.{self.method}.{names}{self.stamp}.json"

    @property
    def determined_by(self) -> dict[str, Any]:
        """The Stats and the plans made of them, beside the protocol."""
        of = {f"{row.stats}": {"stats": row.stats_digest, "plan": row.plan} for row in self.rows}
        return {"calibrated": of, "protocol": self.protocol}


def read_stability(folder: Path) -> list[Result]:
    """All stability results in ``folder``, in name order; raises `ArtifactError` for a damaged one."""
    return [read_measurement(path, Result) for path in sorted(folder.glob("stability.*.json"))]


def spread(rows: list[StabilityRow]) -> dict[str, float]:
    """By text, the largest KL over the smallest; texts on which a KL is zero are left out."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.text, []).append(row.kl_mean)
    return {text: max(values) / min(values) for text, values in found.items() if min(values) > 0}
