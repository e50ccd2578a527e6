"""What memory is asked: sizes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings as _Base

_Positive = Annotated[int, Field(ge=1)]


class Settings(_Base):
    """Every context with every batch."""

    context: tuple[_Positive, ...] = Field((2048,), strict=False, min_length=1, description="Tokens in the cache.")
    batch: tuple[_Positive, ...] = Field((1,), strict=False, min_length=1, description="Sequences at once.")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(context, batch) of every cache that is measured."""
        return [(context, batch) for context in self.context for batch in self.batch]
