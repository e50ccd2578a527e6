"""One step of the engine's batch, as the layers see it: rows that decode first, then prompts and chunks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from aatc_cli.serve.vllm_backend.prefixes import Full


@dataclass(frozen=True)
class Prompt:
    """Rows ``start`` .. ``stop`` - 1 of the batch: the next tokens of the request in ``slot``.

    tokens, tiles: what is cached and packed of it already; blocks int64 [n]: its blocks, in order; back: what takes
    the rotation of its keys off (`Turning.back`). full: blocks that others may read behind these tokens; sinks: the
    first block of a shared prefix, and where its exact rows are kept, for one who joins it.
    """

    start: int
    stop: int
    slot: int
    tokens: int
    tiles: int
    blocks: Tensor
    back: tuple[Tensor, Tensor]
    full: tuple[Full, ...] = ()
    sinks: tuple[int, int | None] | None = None


@dataclass
class Step:
    """decoding: how many first rows are single tokens, each in the slot of its row. blocks: the table of tiles [B, n].

    full: blocks that the decoding rows fill, to be packed by every layer because a prompt of this step may read them.
    """

    decoding: int
    blocks: Tensor
    prompts: list[Prompt] = field(default_factory=list)
    full: tuple[Full, ...] = ()
