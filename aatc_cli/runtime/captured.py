"""What is captured once in a CUDA graph and replayed: any launches, and a decode step for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor


def captured(
    run: Callable[[], None],
    device: torch.device,
    between: Callable[[], None] | None = None,
    warm: int = 2,
    mode: Literal["global", "thread_local"] = "global",
) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches, after ``warm`` runs on a side stream and ``between``; all of them write.

    mode: whose other calls break a capture, those of all threads or of this one.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(side)
    if between is not None:
        between()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        run()
    return graph


class CapturedStep:
    """Greedy steps of ``model`` with ``kwargs``, which hold its cache: ``tokens`` and ``positions`` [B, 1] are fed.

    ``logits`` [B, V] are those of the latest step; ``tokens`` are then the likeliest ones, and positions one further
    by ``moved``.
    """

    def __init__(self, model: Any, kwargs: dict[str, Any], tokens: Tensor, positions: Tensor, moved: Any = 1) -> None:
        self.model, self.kwargs, self.moved = model, kwargs, moved
        self.tokens, self.positions = tokens, positions
        self.logits: Tensor | None = None
        self.graph: Any = None

    def run(self) -> None:
        """A step as it is, or replayed where one was captured."""
        if self.graph is None:
            with torch.no_grad():
                self._forward()
        else:
            self.graph.replay()

    def capture(self, between: Callable[[], None] | None = None) -> None:
        """Capture a step, after two that warm up and ``between``; all of them write what a step writes."""
        with torch.no_grad():
            self.graph = captured(self._forward, self.tokens.device, between)

    def _forward(self) -> None:
        found: Tensor = self.model(input_ids=self.tokens, position_ids=self.positions, **self.kwargs).logits[:, -1]
        self.logits = found
        self.tokens.copy_(found.argmax(-1, keepdim=True))
        self.positions += self.moved
