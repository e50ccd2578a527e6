"""What speed is asked: sizes, repeats, and of a profile alone what else is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from aatc_cli.config import Settings as _Base

_Positive = Annotated[int, Field(ge=1)]


class Settings(_Base):
    """Every context with every batch, each measured ``repeats`` times. The last seven are of a profile alone."""

    context: tuple[_Positive, ...] = Field(
        (), strict=False, description="Tokens in the cache. Default: 2048, or 8192 of a profile alone."
    )
    batch: tuple[_Positive, ...] = Field((1,), strict=False, min_length=1, description="Sequences at once.")
    repeats: int = Field(5, ge=1, description="Times each size is measured.")
    whole_model: bool = Field(False, description="Time whole decode steps too, random weights (profile alone).")
    tiles: bool = Field(False, description="Time fused tiles with classes instead (profile alone, Hopper).")
    ragged: bool = Field(
        False, description="With --tiles: sequences from a 64th of --context up to it instead of equal ones."
    )
    packing: bool = Field(False, description="With --tiles: packing of prompts alone instead of decoding.")
    prompts: bool = Field(False, description="With --tiles: packing and prefill of prompts instead of decoding.")
    flash_attention: Path | None = Field(
        None, description="Shared library of FlashAttention-3 (vLLM's build) to time beside (profile alone, Hopper)."
    )
    groups: str = Field("heads", description="Head groups: heads (fused kernels), all, or a number (profile alone).")

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens in the cache of a model."""
        return self.context or (2048,)

    @property
    def geometry_contexts(self) -> tuple[int, ...]:
        """Tokens in the cache of a profile alone."""
        return self.context or (8192,)
