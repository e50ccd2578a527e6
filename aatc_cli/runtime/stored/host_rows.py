"""Pages to rows without rotation on a CPU, as `pages.Pages.rows` and `rotation.keys_off` together, in one pass."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.runtime.stored.host_decode import STYLES, pool_of
from aatc_cli.runtime.stored.pages import Pages, not_finite
from aatc_cli.runtime.stored.rotation import Rotation

_KINDS = {torch.float16: 1, torch.bfloat16: 2}


class HostRows:
    """The rows of pages of 16-bit numbers, layers by threads."""

    def __init__(self, rotation: Rotation, threads: int) -> None:
        self.rotation, self.pool = rotation, pool_of(threads)
        self.kernel: Any = import_module("aatc_cli.runtime.kernels.host_rows").rows_of_pages

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it reads numbers of this type."""
        return dtype in _KINDS

    def __call__(self, pages: Pages, places: Tensor) -> dict[Side, Tensor]:
        """Rows [L, n, C] in float32; raises `AatcError` for one that is not finite."""
        layers, tokens, heads, dim = pages.shape
        kind, style = _KINDS[pages.keys.dtype], STYLES[self.rotation.style]
        angles = (np.zeros((tokens, 0), dtype=np.float32),) * 2
        if style:
            cos, sin = self.rotation.full_tables(places)
            angles = cos.float().contiguous().numpy(), sin.float().contiguous().numpy()
        factor = np.float32(1 / self.rotation.scale**2)
        found: dict[Side, Tensor] = {side: torch.empty(layers, tokens, heads * dim) for side in SIDES}

        def one(task: tuple[Side, int]) -> bool:
            side, layer = task
            page = pages.of(side)[layer].flatten(1).contiguous().view(torch.int16).numpy().view(np.uint16)
            turned = style if side == "k" else 0
            rotary = angles[0].shape[1]
            return bool(self.kernel(page, kind, dim, rotary, turned, *angles, factor, found[side][layer].numpy()))

        if not all(self.pool.map(one, [(side, layer) for side in SIDES for layer in range(layers)])):
            raise not_finite()
        return found
