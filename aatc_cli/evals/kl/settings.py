"""What kl is asked: windows of held-out text."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.evals.windows.settings import PROMPT, WindowSettings


class Settings(WindowSettings):
    """Windows, and the first position that is scored."""

    prompt: int = Field(0, ge=0, description=PROMPT)
    trace: int = Field(
        0, ge=0, description="Windows per text whose KL is kept token by token, for the report; changes no number."
    )

    @property
    def prompt_tokens(self) -> int:
        """The prompt."""
        return self.prompt

    @property
    def traced(self) -> int:
        """Windows that are kept token by token; no more than there are."""
        return self.trace if self.limit == 0 else min(self.trace, self.limit)
