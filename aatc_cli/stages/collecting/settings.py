"""How collect runs, which changes nothing in its Stats."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings


class CollectOptions(Settings):
    """How it is collected; never hashed."""

    device: str = "cpu"
    dtype: str = "auto"
    batch: int = Field(1, ge=1, description="Windows per forward pass.")
    checkpoint_seconds: float = Field(60.0, ge=0, allow_inf_nan=True, description="Seconds between checkpoints.")
    force: bool = False
    also: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        strict=False,
        description="Smaller numbers of windows whose Stats are kept on the way, as NAME-8, ...; several allowed.",
    )
    fisher_batch: int | None = Field(None, ge=1, description="Windows per gradient pass. Default: --batch.")
    recompute: bool = Field(False, description="Compute layers again in gradient passes: less memory, one pass more.")
    spread: bool = Field(False, description="Let accelerate spread the model over all devices.")

    @property
    def place(self) -> str | None:
        """The one device of everything, or None for a model that accelerate spreads."""
        return None if self.spread else self.device
