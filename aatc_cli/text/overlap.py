"""How much of an evaluation text was also calibration text, by hashes of blocks of tokens that the Stats keep.

Blocks of 16 tokens are cut from every calibration window without gaps and hashed to 64 bits: half a byte per token. An
evaluation text is searched at every position, so neither where windows begin nor how long they are matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
# odd constants of splitmix64
_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """Shares in 0..1. ``tokens`` of the evaluation text that lie in a block of calibration text; ``windows`` of which
    more than half lies in such blocks."""

    tokens: float
    windows: float


def block_hashes(windows: Tensor, bos: int | None) -> Tensor:
    """Hashes of the blocks of calibration ``windows`` [N, T], sorted, each once. -> int64 [M], M <= N T / 16 + N.

    With ``bos`` the first token of a window is no text. A last block reaches back to be whole. Windows of fewer than
    16 tokens have none.
    """
    text = _text(windows, bos)
    places = _places(text)
    last = places.shape[1] - 1
    chosen = sorted({*range(0, last + 1, BLOCK), last}) if last >= 0 else []
    found = np.unique(places[:, chosen])
    return torch.from_numpy(found.view(np.int64))


def overlap(windows: Tensor, bos: int | None, seen: Tensor) -> Overlap | None:
    """The share of evaluation ``windows`` [N, T] that is in the calibration text of hashes ``seen`` (`Stats.blocks`).

    None where it cannot be told: no hashes, or windows shorter than a block.
    """
    text = _text(windows, bos)
    places = _places(text)
    if not seen.numel() or not places.shape[1]:
        return None
    hits = np.isin(places, seen.numpy().view(np.uint64))
    covered = np.zeros(text.shape, dtype=bool)
    for offset in range(BLOCK):
        covered[:, offset : offset + places.shape[1]] |= hits
    return Overlap(float(covered.mean()), float((covered.mean(1) > 0.5).mean()))


def _text(windows: Tensor, bos: int | None) -> Hashes:
    """The tokens of the text alone, mixed to 64 bits each."""
    text = windows if bos is None else windows[:, 1:]
    return _mixed(text.numpy().astype(np.uint64))


def _places(text: Hashes) -> Hashes:
    """The hash of the block that begins at each position of every row. [N, T] -> [N, T - 15]."""
    count = max(text.shape[1] - BLOCK + 1, 0)
    total = np.zeros((text.shape[0], count), dtype=np.uint64)
    for offset in range(BLOCK):
        total = total * _STEP + text[:, offset : offset + count]
    return _mixed(total)


def _mixed(x: Hashes) -> Hashes:
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
