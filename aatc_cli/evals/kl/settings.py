"""What kl is asked: windows of held-out text."""

from __future__ import annotations

from aatc_cli.evals.windows.settings import WindowSettings


class Settings(WindowSettings):
    """Windows, and the first position that is scored."""
