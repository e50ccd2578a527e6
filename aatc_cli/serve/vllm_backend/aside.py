"""Packing of a prompt beside the layers that follow: on a stream of its own, joined behind the last layer.

A layer's prompt is packed by few programs that each take long, which products of the next layers leave room for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Aside:
    """Launches beside the current stream of ``device``; on a CPU, or where ``used`` is false, what is given runs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.used = self.stream is not None

    def __call__(self, run: Callable[[], None], read: tuple[Tensor, ...]) -> None:
        """Launch what ``run`` does behind all that is launched; ``read``: what it reads and somebody may free."""
        if self.stream is None or not self.used:
            run()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            run()
        for tensor in read:
            tensor.record_stream(self.stream)

    def join(self) -> None:
        """What is launched from now on comes behind it."""
        if self.stream is not None and self.used:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
