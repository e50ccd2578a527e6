"""What stored is asked: prefixes of whole chunks, and continuations that read them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aatc_cli.config import Settings as Base
from aatc_cli.evals.windows.settings import TEXT

Ranked = Literal["received", "energy", "key-norm", "value-norm", "place"]


class Settings(Base):
    """Windows of a prefix and a continuation."""

    text: tuple[str, ...] = Field(
        (TEXT,), strict=False, min_length=1, description="Held-out text, as for collect; one file of results each."
    )
    prefix: int = Field(1536, ge=64, description="Tokens of the prefix, whole chunks.")
    tail: int = Field(0, ge=0, description="Tokens behind it that are computed again, exact and not scored.")
    continuation: int = Field(512, ge=1, description="Tokens behind it, which are scored.")
    chunk: Literal[64, 128, 192, 256] = Field(256, description="Tokens of a chunk.")
    ranked: Ranked = Field(
        "key-norm", description="What ranks the tokens of a tile: attention they received in a prefill, or a stand-in."
    )
    limit: int = Field(4, ge=0, description="Windows per text; 0 is all.")
