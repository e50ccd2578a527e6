"""A decode step that is captured once in a CUDA graph and replayed for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
        side = torch.cuda.Stream(self.tokens.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        if between is not None:
            between()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            self._forward()
        self.graph = graph

    def _forward(self) -> None:
        found: Tensor = self.model(input_ids=self.tokens, position_ids=self.positions, **self.kwargs).logits[:, -1]
        self.logits = found
        self.tokens.copy_(found.argmax(-1, keepdim=True))
        self.positions += self.moved
