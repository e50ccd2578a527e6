"""What collect is asked for: the settings that determine the Stats."""

from __future__ import annotations

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
