"""Greedy decoding of a whole model as one replayed CUDA graph over a fused cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.fused import FusedState


class GraphDecoder:
    """One decode step of ``model`` over ``cache``, captured once and replayed per token.

    Made inside ``with fused(...)`` after the prompt has been fed; ``first`` [B] are the tokens that follow it. The
    graph belongs to this cache: its buffers are those that are read.
    """

    def __init__(self, model: Any, cache: HostedCache, keyword: str, first: Tensor) -> None:
        state = cache.state
        if not isinstance(state, FusedState):
            raise AatcError("only a fused cache can be captured in a graph", "make one by runtime.fused")
        self.state, self.model, self.kwargs = state, model, {keyword: cache, "use_cache": True, "logits_to_keep": 1}
        self.tokens = first[:, None].clone()
        self.positions = state.tokens[:, None].to(torch.int64)
        self.logits: Tensor | None = None
        self._capture()

    def step(self) -> Tensor:
        """Feed the current tokens and choose the next, [B]; they are the graph's own buffer, fed by the next step."""
        if self.state.columns + 1 > self.state.capacity:
            raise AatcError(f"the cache's capacity of {self.state.capacity} tokens is used up", "make a larger cache")
        self.graph.replay()
        self.state.columns += 1
        return self.tokens[:, 0]

    def _capture(self) -> None:
        saved = self._save()
        # steps that are only tried out need room; what they write is put back
        self.state.capacity += 3
        side = torch.cuda.Stream(self.tokens.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._load(saved)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self._run()
        self._load(saved)
        self.state.capacity -= 3

    def _run(self) -> None:
        found: Tensor = self.model(input_ids=self.tokens, position_ids=self.positions, **self.kwargs).logits[:, -1]
        self.logits = found
        self.tokens.copy_(found.argmax(-1, keepdim=True))
        self.positions += 1

    def _save(self) -> tuple[int, list[Tensor]]:
        return self.state.columns, [tensor.clone() for tensor in self._changed()]

    def _load(self, saved: tuple[int, list[Tensor]]) -> None:
        self.state.columns = saved[0]
        for tensor, before in zip(self._changed(), saved[1], strict=True):
            tensor.copy_(before)

    def _changed(self) -> list[Tensor]:
        """What a step writes and must not have written before the first real one: counters, angles, exact rows."""
        state = self.state
        counters = [self.tokens, self.positions, state.tokens, state.tiles, state.slot_angles]
        return [*counters, *state.keys, *state.values]
