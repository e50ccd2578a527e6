"""Launch of the kernel that writes new tokens of a batch into the slots of their requests, keys turned back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aatc_cli.runtime.kernels.launch import ELEMENTS, function, launch


class RowKeeper:
    """Writes rows of heads of ``dim`` dimensions in ``dtype``; the launch is the same wherever rows go."""

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim, self.dtype = dim, dtype
        self._kernel = function(
            "keep_rows.cu", "keep_rows", (("D", dim), ("QTYPE", ELEMENTS[dtype])), device.index or 0
        )

    def __call__(
        self,
        rows: tuple[Tensor, Tensor],
        back: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        kept: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write rotated keys and values [n, H, D], heads of a token behind one another, in place.

        back: cos and sin float32 [n, D] that take the rotation off; places: int64 rows [n] of ``kept`` keys and values
        [.., C], and [n, H] of its received numbers, which become zero.
        """
        keys, values = rows
        count, heads = keys.shape[0], keys.shape[1]
        assert all(x.stride(2) == 1 and x.stride(1) == self.dim and x.dtype == self.dtype for x in rows)
        numbers = tuple(np.int32(value) for value in (heads, keys.stride(0), values.stride(0)))
        launch(self._kernel, (count, heads, 1), self.dim // 2, numbers, (keys, values, *back, *places, *kept))
