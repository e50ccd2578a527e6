"""What needles is asked: contexts, depths, and the text around the needle."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aatc_cli.config import Settings as _Base
from aatc_cli.evals.windows.settings import TEXT


class Settings(_Base):
    """One needle at every depth of every context, ``limit`` times with other keys and numbers."""

    context: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1024, 2048), strict=False, min_length=1, description="Tokens of prompt and answer."
    )
    depth: tuple[Annotated[int, Field(ge=0, le=100)], ...] = Field(
        (0, 25, 50, 75, 100), strict=False, min_length=1, description="Place of the needle in the text, in percent."
    )
    limit: int = Field(4, ge=1, description="Needles at every depth of every context.")
    text: tuple[str, ...] = Field((TEXT,), strict=False, min_length=1, description="Essays around the needle.")
    seed: int = Field(0, ge=0, description="Seed of keys and numbers.")
    mode: Literal["generate", "forced"] = Field(
        "generate", description="forced: one pass a prompt with its answer appended, instead of generating one."
    )
    chat: bool = Field(False, description="Ask in the model's chat template.")
