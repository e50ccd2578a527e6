"""What kl is asked: windows of held-out text."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.evals.windows.settings import WindowSettings


class Settings(WindowSettings):
    """Windows, the first position that is scored, and how many windows are kept token by token."""

    traces: int = Field(0, ge=0, description="Windows whose KL is kept token by token, for the report.")

    @property
    def kept_windows(self) -> int:
        """Windows that are kept token by token."""
        return self.traces
