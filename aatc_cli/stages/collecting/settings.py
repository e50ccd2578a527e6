"""What collect is asked for: the settings that determine the Stats, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from aatc_cli.config import Settings, Window


class CollectSettings(Settings):
    """What is collected; together with the model and the texts it determines the Stats."""

    samples: int = Field(ge=1, description="windows")
    length: int = Field(ge=2, description="tokens per window")
    seed: int = Field(0, ge=0, lt=2**31)
    skip_first: int = Field(4, ge=0, description="positions at the start of each window that enter no statistic: sinks")
    rows: int = Field(4096, ge=1, description="rows of K and V kept per layer for percentiles")
    fisher: int = Field(0, ge=0, description="leading windows whose loss gradients are collected as well")
    window: Window = Field(Window(), description="tokens a query reads exactly; gradients are of the rest")
    head_groups: int = Field(1, ge=1, description="the profile's head groups, which whiten takes unless told otherwise")


@dataclass(frozen=True)
class CollectOptions:
    """How it is collected; never hashed."""

    device: str = "cpu"
    dtype: str = "auto"
    batch: int = 1
    checkpoint_seconds: float = 60.0
    force: bool = False
    fisher_batch: int | None = None
    recompute: bool = False
    spread: bool = False

    @property
    def place(self) -> str | None:
        """The one device of everything, or None for a model that accelerate spreads."""
        return None if self.spread else self.device
