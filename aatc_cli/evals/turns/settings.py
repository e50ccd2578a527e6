"""What turns is asked: how long the first text is, how many questions follow, and what is read between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings as _Base
from aatc_cli.evals.answers.settings import SAMPLES
from aatc_cli.evals.windows.settings import TEXT


class Settings(_Base):
    """Conversations: a text with a number for every turn, then questions for one after the other."""

    context: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1024,), strict=False, min_length=1, description="Tokens of the first turn, text and question and answer."
    )
    turns: int = Field(4, ge=2, le=40, description="Questions, each for another number of the first text.")
    between: int = Field(100, ge=0, description="Words of other text that stand before every later question.")
    limit: int = Field(SAMPLES, ge=1, description="Conversations at every context.")
    text: tuple[str, ...] = Field((TEXT,), strict=False, min_length=1, description="Text around the numbers.")
    seed: int = Field(0, ge=0, description="Seed of keys and numbers.")
