"""Numbers between host and device: whole ones without a wait, and those without a type as float32 ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device) -> Tensor:
    """Whole numbers as int64 on ``device``, in order with what is launched there.

    A copy of a few numbers from memory that is not pinned is staged before the call returns: nothing waits for the
    device, and what they were may go at once.
    """
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


@contextmanager
def in_float32() -> Iterator[None]:
    """Tensors that are made here without a type are float32, as everywhere outside of an engine.

    vLLM makes a model while torch's own default is the model's type: tables of a plan would be rounded to 16 bits, and
    kernels would read twice the memory that they have.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
