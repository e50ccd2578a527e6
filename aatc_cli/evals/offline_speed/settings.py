"""What offline-speed is asked: sizes of windows and batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings as _Base

_Positive = Annotated[int, Field(ge=1)]


class Settings(_Base):
    """Every context with every batch, each timed ``repeats`` times."""

    context: tuple[_Positive, ...] = Field((2048,), strict=False, min_length=1, description="Tokens of a window.")
    batch: tuple[_Positive, ...] = Field((4,), strict=False, min_length=1, description="Windows of a pass.")
    repeats: int = Field(5, ge=1, description="Times each size is measured.")
