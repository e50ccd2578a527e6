"""What the benchmarks of lm-eval are asked: how many records, of which subtasks, from where."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.evals.answers.settings import AnswerSettings


class Settings(AnswerSettings):
    """Records of every subtask."""

    data: str | None = Field(None, description="Folder of the benchmark's JSON lines, or hub. Default: hub.")
