"""Standard streams of the command: open in any case, an output that says when it fails, a log that may be lost."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutputError(OSError):
    """The standard output does not take what is written to it."""


class _Stream:
    """A stream that is written through; ``lenient`` loses what cannot be written, else `OutputError` is raised.

    A pipe whose reader went away raises `BrokenPipeError` in either case.
    """

    def __init__(self, stream: Any, *, lenient: bool) -> None:
        self._stream, self._lenient = stream, lenient

    def write(self, text: str) -> int:
        with self._failing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._lenient:
                raise OutputError(error.errno, error.strerror) from error


def open_streams() -> bool:
    """Whether there is a standard output. Each closed stream gets a place, lest a file of ours be opened as one."""
    there = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free, which is this one
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    return there


@contextmanager
def guarded_streams() -> Iterator[None]:
    """While the block lasts, a failing standard output raises `OutputError`, and a log that cannot be written is lost.

    What a terminal's encoding lacks is shown as its escape. The output is flushed at the end, so that a full disk or a
    closed pipe is met there and not at the end of the interpreter.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _Stream(before[0], lenient=False), _Stream(before[1], lenient=True)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
