"""What the tasks share that score generated answers."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.config import Settings

# samples of a subtask unless asked otherwise: enough to see a fall, few enough for a CPU
SAMPLES = 20


class AnswerSettings(Settings):
    """How many samples of which parts are asked, and how."""

    limit: int = Field(SAMPLES, ge=0, description="Samples per subtask; 0 is all.")
    subtask: tuple[str, ...] = Field(
        (), strict=False, description="Part of the benchmark, globs allowed. Default: all."
    )
    chat: bool = Field(False, description="Ask in the model's chat template.")
