"""What a file of stored holds: bytes of the chunks, and the divergence behind them."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement


class Result(Measurement):
    """Continuations of one text that read their prefix out of chunks of one plan."""

    task: Literal["stored"] = "stored"
    text: str
    text_sha256: str
    windows: int
    prefix: int = Field(description="tokens of the prefix")
    tail: int = Field(0, description="tokens behind it that were computed again, exact and not scored")
    continuation: int = Field(description="tokens behind it, scored but for the last")
    chunk: int = Field(description="tokens of a chunk")
    ranked: str = Field(description="what ranked the tokens of a tile")
    bytes_stored: float = Field(description="bytes of the chunks of a prefix, heads and exact sinks too, on average")
    bytes_raw: int = Field(description="the same as pages of 16-bit numbers, of the layers that are coded")
    ratio: float | None = Field(None, description="raw over stored bytes")
    kl_mean: float | None = Field(None, description="KL(exact prefix || stored prefix), nats per token")
    kl_stderr: float | None = Field(None, description="standard error over windows")
    kl_windows: list[float] | None = Field(None, description="mean KL of every window, by which plans are paired")
    kl_p99: float | None = Field(None, description="99th percentile over scored positions")
    top1: float | None = Field(None, description="share of positions with the same most likely token")
    encode_seconds: float | None = Field(None, description="of a chunk, on average, on the device of the model")
    decode_seconds: float | None = Field(None, description="the same of decoding")

    @property
    def file_name(self) -> str:
        """File it is stored under: task, plan, text, tokens, what ranked them, protocol."""
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", self.text).strip("-")
        tokens = f"{self.prefix}-{self.tail}-{self.continuation}"
        return f"{self.task}.{self.method}.{text}.{tokens}.{self.ranked}{self.stamp}.json"
