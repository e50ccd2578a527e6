"""Tensors on their way to a device, which is not waited for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(held: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """``held`` on ``device``, in ``dtype`` if one is given.

    What comes from the memory of the host is read before the call returns, so nobody need wait until a GPU has it; a
    plan has hundreds of small tensors, and one that others use answers late. The way back is waited for.
    """
    ahead = held.device.type == "cpu" and torch.device(device).type != "cpu"
    return held.to(device=device, dtype=dtype or held.dtype, non_blocking=ahead)
