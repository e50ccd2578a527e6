"""Mixed min-max: a codec of groups between minimum and maximum, some channels of which stay as they are (MixKVQ)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.casting import saturated
from aatc_cli.core.grouped import GroupedMinMax

Floats = NDArray[np.float64]
WHOLE = 16


@dataclass(frozen=True)
class MixedMinMax:
    """base: codes the channels; those of its bits [C] that are 16 are float16 numbers instead."""

    base: GroupedMinMax

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [..., T, C] as the cache returns them, in the dtype of ``x``."""
        whole = self.base.bits == WHOLE
        narrow = replace(self.base, bits=torch.where(whole, 8, self.base.bits))
        return torch.where(whole, saturated(x, torch.float16).to(x.dtype), narrow.reconstruct(x))

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> MixedMinMax:
        """Move to a device."""
        return MixedMinMax(self.base.to(device))


def channel_salience(rows: Tensor, queries: Tensor, group: int, bits: int) -> Tensor:
    """What a channel's quantization step does to scores: E[q_d^2]^(1/2) times its mean step in groups. -> [C] float64.

    rows [R, C]: sampled vectors; queries [H, D, D]: second moment of a kv head's queries. A step is the range of
    ``group`` rows over 2^bits - 1.
    """
    whole = max(rows.shape[0] // group, 1) * group
    parts = torch.unflatten(rows.to(torch.float64)[:whole], 0, (-1, min(group, rows.shape[0])))
    step = (parts.amax(1) - parts.amin(1)).mean(0) / (2**bits - 1)
    size: Tensor = queries.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().flatten()
    found: Tensor = size * step
    return found


def tiers(salience: Floats, budget: int, widths: tuple[int, ...], ratio: float) -> NDArray[np.int64]:
    """Widths [n] of three tiers: the widest above ``ratio`` times the level above which the middle one begins.

    The level is the lowest at which no more than ``budget`` bits are spent; equal salience falls to the lower channel.
    """
    low, middle, high = widths
    order = np.argsort(-salience, kind="stable")
    ranked = salience[order]
    best = np.full(salience.size, low, dtype=np.int64)
    for count in range(1, salience.size + 1):
        level = ranked[count - 1]
        wide = int(np.searchsorted(-ranked, -ratio * level, side="right"))
        found = np.full(salience.size, low, dtype=np.int64)
        found[order[:count]] = middle
        found[order[: min(wide, count)]] = high
        if int(found.sum()) > budget:
            break
        best = found
    return best
