"""Which windows of which texts are scored, and from which position on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings

TEXT = "builtin:python-docs-test"


PROMPT = "Tokens of a window that are a prompt: they attend to one another exactly, then they are compressed."


class WindowSettings(Settings):
    """What the tasks share that score windows of held-out text."""

    text: tuple[str, ...] = Field(
        (TEXT,), strict=False, min_length=1, description="Held-out text, as for collect; one file of results each."
    )
    length: int = Field(1024, ge=2, description="Tokens per window.")
    limit: int = Field(4, ge=0, description="Windows per text; 0 is all.")
    first: Annotated[int, Field(ge=0)] | None = Field(
        None, description="First scored position. Default: 512, or half a window."
    )

    @property
    def first_position(self) -> int:
        """First scored position of a window."""
        return self.first if self.first is not None else max(self.default_first, self.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a window that enter the cache in one prefill, of a task that can; 0: each is a decode step."""
        return 0

    @property
    def default_first(self) -> int:
        """What it is where none is asked for: where a cache of the usual windows has packed tokens."""
        return min(512, self.length // 2)

    @property
    def traced(self) -> int:
        """Windows of every text that are kept token by token, by a task that can."""
        return 0

    @property
    def measured_queries(self) -> int | None:
        """Query positions measured per window, of a task that measures some; None where it scores all."""
        return None
