"""One step of the engine's batch, as the layers see it: rows that decode first, then prompts and chunks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """Rows ``start`` .. ``stop`` - 1 of the batch: the next tokens of the request in ``slot``.

    tokens, tiles: what is cached and packed of it already; blocks int64 [n]: its blocks, in order; back: what takes
    the rotation of its keys off (`Turning.back`).
    """

    start: int
    stop: int
    slot: int
    tokens: int
    tiles: int
    blocks: Tensor
    back: tuple[Tensor, Tensor]


@dataclass
class Step:
    """decoding: how many first rows are single tokens, each in the slot of its row. blocks: the block table [B, n]."""

    decoding: int
    blocks: Tensor
    prompts: list[Prompt] = field(default_factory=list)
