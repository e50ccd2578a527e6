"""How collect runs, which changes nothing in its Stats."""

from __future__ import annotations

from pydantic import Field

from aatc_cli.config import Settings


class CollectOptions(Settings):
    """How it is collected; never hashed."""

    device: str = "cpu"
    dtype: str = "auto"
    batch: int = Field(1, ge=1, description="Windows per forward pass.")
    checkpoint_seconds: float = Field(60.0, ge=0, allow_inf_nan=True, description="Seconds between checkpoints.")
    force: bool = False
    fisher_batch: int | None = Field(None, ge=1, description="Windows per gradient pass. Default: --batch.")
    recompute: bool = Field(False, description="Compute layers again in gradient passes: less memory, one pass more.")
    spread: bool = Field(False, description="Let accelerate spread the model over all devices.")

    @property
    def place(self) -> str | None:
        """The one device of everything, or None for a model that accelerate spreads."""
        return None if self.spread else self.device
