"""What RULER is asked: contexts, subtasks and the text around the needles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aatc_cli.evals.answers.settings import AnswerSettings
from aatc_cli.evals.windows.settings import TEXT


class Settings(AnswerSettings):
    """Subtasks at every context; limit 0 is RULER's own number of samples."""

    context: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1024,), strict=False, min_length=1, description="Tokens of prompt and answer."
    )
    text: tuple[str, ...] = Field((TEXT,), strict=False, min_length=1, description="Essays around the needles.")
    data: str | None = Field(None, description="Folder of the SQuAD and HotpotQA files of qa_1 and qa_2, or hub.")
    mode: Literal["generate", "forced"] = Field(
        "generate", description="forced: one pass a prompt with its answer appended, instead of generating one."
    )
    server: str | None = Field(
        None, description="Address of a server that answers in place of a model here, --batch prompts at once."
    )
    seed: int = Field(0, ge=0, description="Seed of the prompts.")
