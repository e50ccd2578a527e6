"""Seconds of parts of a pass, taken without making the host wait for a GPU in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def clock(device: str) -> float:
    """Seconds on a running clock, after all that was asked of a GPU is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Adds up the time of blocks. On a GPU events mark them in its stream, and `seconds` waits for the last of them."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count what ``device`` does in the block."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        yield
        end.record(stream)
        self._spans.append((begin, end))

    def seconds(self) -> float:
        """All blocks so far together."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._spans.clear()
        return self._seconds
