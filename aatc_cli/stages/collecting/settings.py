"""How collect runs, which changes nothing in its Stats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectOptions:
    """How it is collected; never hashed."""

    device: str = "cpu"
    dtype: str = "auto"
    batch: int = 1
    checkpoint_seconds: float = 60.0
    force: bool = False
    fisher_batch: int | None = None
    recompute: bool = False
    spread: bool = False

    @property
    def place(self) -> str | None:
        """The one device of everything, or None for a model that accelerate spreads."""
        return None if self.spread else self.device
