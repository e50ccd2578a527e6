"""What a file of memory holds: bytes that are live, bytes the law predicts, and the most that was in use."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings


class MemoryRow(Settings):
    """One cache at one size. Peaks are of the process on a CPU, of the device's allocator on a GPU; null if unknown."""

    context: int = Field(description="tokens per sequence")
    batch: int = Field(description="sequences")
    bytes_live: int = Field(description="sum of the storages behind the live cache, each counted once")
    bytes_predicted: int = Field(description="the byte law, with what is exact in the dtype of the cache")
    bytes_fp16: int = Field(description="of the uncompressed cache in float16")
    ratio: float = Field(description="bytes_fp16 over bytes_live")
    base_bytes: int | None = Field(description="memory in use before the first token, the model included")
    peak_bytes: int | None = Field(description="the most in use while the cache is filled and the last token decoded")
    peak_decode_bytes: int | None = Field(None, description="the most in use while the last token is decoded")
    base_bytes_reference: int | None = Field(None, description="base_bytes where the model has its own cache")
    peak_bytes_reference: int | None = Field(None, description="peak_bytes with the model's own cache, in its dtype")
    peak_decode_bytes_reference: int | None = Field(None, description="peak_decode_bytes with the model's own cache")


class Result(Measurement):
    """Memory of one plan, or of a width alone: ``synthetic`` caches hold random vectors under a random plan."""

    task: Literal["memory"] = "memory"
    synthetic: bool = Field(description="of a geometry alone: random widths of the given mean, no model")
    rows: list[MemoryRow]

    @property
    def file_name(self) -> str:
        """File the result is stored under: task, recipe, budget, the model where there is none of the run."""
        place = "." + re.sub(r"[^A-Za-z0-9._-]+", "-", self.model) if self.synthetic else ""
        return f"{self.task}.{self.method}{place}{self.stamp}.json"
