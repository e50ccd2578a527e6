"""Whether attention of decoding requests is numbers: every step counts on the device, later ones ask without waiting.

Rows of decode attention were once seen to become no numbers at random steps, by a fault of the kernel that is mended
(docs/log/serving.md). What is no number stays none in all layers behind, so the last one is looked at. An engine whose
answers would be wrong ends instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError


class Soundness:
    """How many rows of plan ``plan`` were no numbers, int32 [1] on ``device``.

    Which rows are of requests is told by the host, apart from the lengths that the kernel reads: a request whose length
    did not arrive would be none to the kernel, and attend to nothing.
    """

    def __init__(self, plan: str, device: torch.device) -> None:
        self.plan = plan
        self.live, self.total = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.broken = torch.zeros(1, dtype=torch.int32, device=device)
        self.known = torch.zeros(1, dtype=torch.int32, pin_memory=True) if self.broken.is_cuda else self.broken
        self._copied: Any = None

    def expect(self, lengths: Sequence[int]) -> None:
        """The next step has requests of these lengths in its first rows; said by launches, which carry the numbers."""
        self.live.fill_(len(lengths))
        self.total.fill_(sum(lengths))

    def look(self, out: Tensor, tokens: Tensor) -> None:
        """Count rows of ``out`` [B, Hq, D] that are no numbers; all where ``tokens`` int32 [B] are not those."""
        mine = torch.arange(out.shape[0], device=out.device) < self.live
        wrong = out.isfinite().logical_not_().flatten(1).any(1) | (tokens.sum() != self.total)
        self.broken += (wrong & mine).sum(dtype=torch.int32)

    def check(self) -> None:
        """Raise `AatcError` where rows were broken in a step that is done; ask for those of the steps under way."""
        if self._copied is not None and not self._copied.query():
            return
        if int(self.known):
            raise AatcError(
                f"attention of {int(self.known)} decoding requests of {self.plan} became no number",
                "start the server again and ask again, and report it: see docs/serving.md",
            )
        if self.broken.is_cuda:
            self.known.copy_(self.broken, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
