"""Blocks of latents of one precision, falling along the spectrum, and the dynamic programme that chooses them.

A block of n latents at b bits takes n b + 16 bits of a token: codes and one float16 scale (`core.block_codec`). What
lies behind the last block is dropped. Source: KVTC (2511.01815), without its entropy stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.errors import AatcError

Floats = NDArray[np.float64]

SIZES = (16, 64, 256, 1024)
GRID = SIZES[0]
WIDTHS = (8, 4, 2, 1)
SCALE_BITS = 16


@dataclass(frozen=True)
class Block:
    """Latents ``start`` .. ``start + size - 1`` at ``bits`` bits each."""

    start: int
    size: int
    bits: int


def choose_blocks(errors: Floats, energy: Floats, budget: int) -> tuple[Block, ...]:
    """Blocks from latent 0 on, precision never rising, of least error with at most ``budget`` bits per token.

    errors: `block_errors`; energy [n]: what dropping a latent costs. Exact: all prefixes, precisions and budgets in
    steps of 16 bits are tried. Ties go to fewer bits. Raises `AatcError` where not one block fits.
    """
    units = budget // SCALE_BITS
    count, widths = errors.shape[0], len(WIDTHS)
    tails = np.concatenate((np.cumsum(energy[::-1])[::-1], [0.0]))[::GRID]
    # best[i, w, u]: least error of coding the latents before place i in u units, the last block at width w or wider
    best = np.full((count + 1, widths, units + 1), np.inf)
    best[0] = 0.0
    source = np.full((count + 1, widths, units + 1), -1, dtype=np.int32)
    for end in range(1, count + 1):
        for place, size in enumerate(SIZES):
            start = end - size // GRID
            if start < 0:
                continue
            for index, bits in enumerate(WIDTHS):
                cost = size * bits // SCALE_BITS + 1
                if cost > units:
                    continue
                total = best[start, index, : units + 1 - cost] + errors[start, place, index]
                better = total < best[end, index, cost:]
                best[end, index, cost:] = np.where(better, total, best[end, index, cost:])
                source[end, index, cost:] = np.where(better, place * widths + index, source[end, index, cost:])
        for index in range(1, widths):
            wider = best[end, index - 1] <= best[end, index]
            best[end, index] = np.where(wider, best[end, index - 1], best[end, index])
            source[end, index] = np.where(wider, source[end, index - 1], source[end, index])
    ends = best[:, -1] + tails[:, None]
    end, unit = (int(v) for v in np.unravel_index(int(np.argmin(ends)), ends.shape))
    if end == 0 and units < GRID // SCALE_BITS + 1:
        raise AatcError(f"{budget} bits per token do not pay for one block of {GRID} latents", "raise the budget")
    return _walk_back(source, end, unit)


def _walk_back(source: NDArray[np.int32], end: int, unit: int) -> tuple[Block, ...]:
    blocks: list[Block] = []
    index = len(WIDTHS) - 1
    while end > 0:
        place, index = divmod(int(source[end, index, unit]), len(WIDTHS))
        size, bits = SIZES[place], WIDTHS[index]
        end, unit = end - size // GRID, unit - (size * bits // SCALE_BITS + 1)
        blocks.append(Block(end * GRID, size, bits))
    return tuple(reversed(blocks))


def block_widths(blocks: Sequence[Block], count: int) -> tuple[list[int], list[int]]:
    """Width of each of ``count`` latents, and 1 where a block begins, else 0."""
    widths, starts = [0] * count, [0] * count
    for block in blocks:
        widths[block.start : block.start + block.size] = [block.bits] * block.size
        starts[block.start] = 1
    return widths, starts


def blocks_of(widths: Sequence[int], starts: Sequence[int]) -> tuple[Block, ...]:
    """The blocks that `block_widths` wrote down."""
    places = [place for place, begins in enumerate(starts) if begins]
    coded = sum(1 for width in widths if width)
    ends = [*places[1:], coded][: len(places)]
    return tuple(Block(start, end - start, widths[start]) for start, end in zip(places, ends, strict=True))
