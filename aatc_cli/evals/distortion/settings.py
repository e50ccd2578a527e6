"""What distortion is asked: windows of held-out text, and queries in each."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.evals.windows.settings import WindowSettings


class Settings(WindowSettings):
    """Windows, and how many queries are measured in each."""

    queries: int = Field(8, ge=1, description="Query positions per window.")

    @property
    def measured_queries(self) -> int | None:
        """No more than there are positions."""
        return min(self.queries, self.length - self.first_position)
