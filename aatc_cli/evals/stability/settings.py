"""What stability is asked: the Stats to compare, and windows of held-out text."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.evals.windows.settings import WindowSettings


class Settings(WindowSettings):
    """Stats, two or more, and the windows that all their plans are scored on."""

    stats: tuple[str, ...] = Field((), strict=False, description="Stats to calibrate on, two or more.")
