"""What perplexity is asked: windows of held-out text, scored from their start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.evals.windows.settings import PROMPT, WindowSettings


class Settings(WindowSettings):
    """Windows, and the first position that is scored."""

    first: Annotated[int, Field(ge=0)] | None = Field(
        None, description="First scored position. Default: 0, or behind the prompt."
    )
    prompt: int = Field(0, ge=0, description=PROMPT)

    @property
    def default_first(self) -> int:
        """The whole window."""
        return 0

    @property
    def prompt_tokens(self) -> int:
        """The prompt."""
        return self.prompt
