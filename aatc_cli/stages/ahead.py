"""Work that is begun before its turn, so that reading, computing on a GPU and writing overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import TypeVar

import torch

Found = TypeVar("Found")
# an eigenproblem is a chain of small kernels: several at once fill a GPU better than one
_WORKERS = 4


def workers_of(device: torch.device) -> int:
    """Threads that are worth having: 1 on a CPU, which one computation fills."""
    if device.type == "cpu":
        return 1
    # torch loads the linear algebra of a GPU at its first use, which two threads must not be
    torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=device))
    return _WORKERS


def ahead(function: Callable[[int], Found], count: int, workers: int) -> Iterator[Found]:
    """``function`` of 0 .. count - 1 in order, at most ``workers`` of them begun and not yet taken.

    With one worker nothing is begun before its turn and there is no thread. What ``function`` raises is raised here.
    """
    if workers == 1:
        yield from map(function, range(count))
        return
    waiting: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for index in range(count):
                waiting.append(pool.submit(function, index))
                if len(waiting) == workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def streaming(device: torch.device) -> Iterator[None]:
    """While the block lasts, a thread has a stream of its own on a GPU, and waits for it in the end."""
    if device.type == "cpu":
        yield
        return
    stream = _stream_of(device, get_ident())
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@lru_cache(maxsize=16)
def _stream_of(device: torch.device, thread: int) -> torch.cuda.Stream:
    # one for a thread: memory that is given back is used again by the stream that had it alone
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
