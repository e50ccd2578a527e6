"""What references is asked: where the records are, and how long prompts and answers are."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.config import Settings as _Base
from aatc_cli.evals.answers.settings import SAMPLES


class Settings(_Base):
    """Records of every subtask, each with its prompt cut to one length."""

    data: str = Field("data", description="Folder with a folder of JSON lines for each benchmark.")
    subtask: tuple[str, ...] = Field((), strict=False, description="Part of it, globs allowed. Default: all.")
    length: int = Field(2048, ge=16, description="Tokens of every prompt: worked examples, or the document, are cut.")
    answer: int = Field(256, ge=1, description="First tokens of a written answer that are scored.")
    limit: int = Field(SAMPLES, ge=1, description="Records of every subtask.")
