"""Numbers between host and device: whole ones without a wait, and those without a type as float32 ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


# pinned memory of copies that the device may not have made yet, and what says that it has, in order
_ON_THEIR_WAY: deque[tuple[torch.cuda.Event, Tensor]] = deque()


def on_device(values: Any, device: torch.device) -> Tensor:
    """Whole numbers as int64 on ``device``, in order with what is launched there.

    A plain copy waits until the device has done all that came before, so that a step's host work would follow the step
    before it instead of running beside it. The host's memory is held here until the copy was made: a step sends
    numbers several times, and what is given back before is written over by those that come next.
    """
    host = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device)
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    found = pinned.to(device, non_blocking=True)
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    while _ON_THEIR_WAY and _ON_THEIR_WAY[0][0].query():  # type: ignore[no-untyped-call]
        _ON_THEIR_WAY.popleft()
    _ON_THEIR_WAY.append((made, pinned))
    return found


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
