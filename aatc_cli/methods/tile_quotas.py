"""What a recipe says of tiles: the table ``[tokens]`` with the quotas of their classes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from aatc_cli.config import Settings
from aatc_cli.core.tile_sizes import RANKS, ROWS, TILE


class TileQuotas(Settings):
    """Tokens in tiles of 64: so many of each go into every class, ranked by the attention they received while exact."""

    quotas: tuple[int, ...] = Field(
        min_length=1, max_length=4, strict=False, description="tokens of a tile in every class, least attended first"
    )
    order: Literal["head", "layer"] = Field("head", description="each kv head ranks tokens itself, or a layer does")
    ranked_by: Literal["received", "chance"] = Field(
        "received", description="attention received while exact, or a fixed function of the place: the control"
    )
    floor: float = Field(
        0.0, ge=0, le=1, description="share of the average cost in every class's: least bits for what nobody read yet"
    )
    lowest_bits: float = Field(
        0.0, ge=0, le=8, description="least packed bits of a number of the lowest class, at any budget that pays for it"
    )

    @model_validator(mode="after")
    def _quotas_fit(self) -> Self:
        if any(quota <= 0 or quota % ROWS for quota in self.quotas) or sum(self.quotas) != TILE:
            raise ValueError(f"quotas must be multiples of {ROWS} that sum to {TILE}, the tokens of a tile")
        return self

    def costs_shape(self, channels: int) -> tuple[int, int, int]:
        """Shape of a Transform's costs by rank at a site: the order of the layer and of each head, ranks, channels."""
        return 2, RANKS, channels
