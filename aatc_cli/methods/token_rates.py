"""What a recipe says of token rates: the table ``[tokens]`` of classes by received attention."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from aatc_cli.config import Settings


class TokenRates(Settings):
    """Tokens at several rates: classes by the attention a token received while exact, each with widths of its own."""

    shares: tuple[float, ...] = Field(
        min_length=2, max_length=16, strict=False, description="of the tokens, in every class, least attended first"
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if min(self.shares) <= 0 or abs(sum(self.shares) - 1.0) > 1e-6:
            raise ValueError("shares must be positive and sum to 1")
        return self
