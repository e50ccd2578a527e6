"""Whether attention of a decoding request was ever no number: noted on the device, read without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError


class Guard:
    """Watches attention of a decoding batch: once it was not finite, what its request says since is wrong."""

    def __init__(self, device: torch.device) -> None:
        self.wrong = torch.zeros((), dtype=torch.bool, device=device)
        # on a GPU what the device had noted when this was last asked for, there when the event has come
        event: Any = torch.cuda.Event
        self._event: Any = event() if device.type == "cuda" else None
        self._noted = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._asked = False

    def note(self, out: Tensor, tokens: Tensor) -> None:
        """Note attention [B, Hq, D] that is not finite in a row that has any ``tokens`` [B]; may be captured."""
        bad = ~torch.isfinite(out).flatten(1).all(1) & (tokens > 0)
        self.wrong.logical_or_(bad.any())

    def check(self, plan: str) -> None:
        """Raise `AatcError` with the plan's name where something was noted, on a GPU some steps later."""
        if self._found():
            raise AatcError(
                f"{plan}: attention of a request that decodes was no number, so its answer is wrong",
                "start the server again, with --no-async-scheduling, on a card that nobody else uses",
            )

    def _found(self) -> bool:
        if self._event is None:
            return bool(self.wrong)
        if self._asked and not self._event.query():
            return False
        found = bool(self._noted)
        self._noted.copy_(self.wrong, non_blocking=True)
        self._event.record()
        self._asked = True
        return found
