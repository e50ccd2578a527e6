"""What accumulate is asked: how long a prompt, how many tokens behind it, and who chooses them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings as _Base
from aatc_cli.evals.windows.settings import TEXT

# who chooses the tokens: the held-out text, the model with the compressed cache, the model with its own
WAYS = ("text", "own", "uncompressed")
Way = Annotated[str, Field(pattern=f"^({'|'.join(WAYS)})$")]


class Settings(_Base):
    """Windows of held-out text; their first tokens are a prompt, and what follows is decoded token by token."""

    text: tuple[str, ...] = Field(
        (TEXT,), strict=False, min_length=1, description="Held-out text, as for collect; one file of results each."
    )
    prompt: int = Field(256, ge=1, description="Tokens of a window that enter the cache in one prefill.")
    tokens: int = Field(512, ge=8, description="Tokens that are decoded behind the prompt, one by one.")
    limit: int = Field(4, ge=0, description="Windows per text; 0 is all.")
    way: tuple[Way, ...] = Field(
        WAYS,
        strict=False,
        min_length=1,
        description="Who writes: the text, the model with the compressed cache, the model with its own.",
    )
    temperature: Annotated[float, Field(ge=0)] = Field(1.0, description="Of what a model writes; 0 is greedy.")
    seed: int = Field(0, ge=0, description="Seed of what a model writes.")
    at_once: bool = Field(
        False, description="Read tokens that are given (text, uncompressed) in one pass, which comes to the same."
    )

    @property
    def live(self) -> bool:
        """Whether any tokens enter a live cache."""
        return not self.at_once or "own" in self.way

    @property
    def length(self) -> int:
        """Tokens of a window: the prompt, what is fed behind it, and one more for the last to predict."""
        return self.prompt + self.tokens + 1
