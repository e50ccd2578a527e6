"""What recall is asked: windows of held-out text, and how far behind its first mention a word must stand."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.config import Settings as _Base
from aatc_cli.evals.windows.settings import TEXT


class Settings(_Base):
    """Windows, and the least gap between a word and its second mention."""

    text: tuple[str, ...] = Field(
        (TEXT,), strict=False, min_length=1, description="Held-out text, as for collect; one file of results each."
    )
    length: int = Field(2048, ge=2, description="Tokens per window.")
    limit: int = Field(8, ge=0, description="Windows per text; 0 is all.")
    gap: int = Field(256, ge=1, description="Least tokens between a word and its second mention.")
