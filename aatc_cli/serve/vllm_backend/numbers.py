"""Small numbers from the host to the device without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device) -> Tensor:
    """Whole numbers as int64 on ``device``, in order with what is launched there.

    A plain copy waits until the device has done all that came before, so that a step's host work would follow the step
    before it instead of running beside it. Pinned memory is given back by torch when the copy has been made.
    """
    host = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
