"""How far a command is: a bar on a terminal, and without one a line every half minute, so that no log looks hung."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from aatc_cli.console.stderr import log, loudness, say

# seconds between lines where there is no terminal
BEAT = 30.0


class Ticker:
    """Handle on a progress bar: advance it, or change its text."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        """Move the bar by ``steps`` and optionally replace its description."""
        self._progress.update(self._task, advance=steps, description=text) if text else self._progress.update(
            self._task, advance=steps
        )


def duration(seconds: float) -> str:
    """Seconds as people say them: ``42 s``, ``7 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return f"{round(seconds / 60, 1):g} min"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _beats(line: Callable[[float], str]) -> Iterator[list[float]]:
    """While the block lasts, say ``line(seconds passed)`` every `BEAT` seconds; yields the times it was said at."""
    ended, began, said = Event(), time.monotonic(), list[float]()

    def beat() -> None:
        while not ended.wait(BEAT):
            said.append(time.monotonic() - began)
            say(line(said[-1]))

    thread = Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield said
    finally:
        ended.set()
        thread.join()


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner with the time passed, for work whose steps cannot be counted; without a terminal, a line now and then.

    What takes less than `BEAT` seconds leaves no line in a log.
    """
    if loudness() == "quiet":
        yield
    elif log.is_terminal:
        with Progress(SpinnerColumn(), TextColumn(text), TimeElapsedColumn(), console=log, transient=True) as bar:
            bar.add_task(text, total=None)
            yield
    else:
        with _beats(lambda seconds: f"{text}: {duration(seconds)} so far"):
            yield


@contextmanager
def progress(text: str, total: int, done: int = 0) -> Iterator[Ticker]:
    """A progress bar on stderr; without a terminal, a line at the start and one every `BEAT` seconds."""
    shown = log.is_terminal and loudness() != "quiet"
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=log,
        transient=False,
        disable=not shown,
    )
    with bar:
        task = bar.add_task(text, total=total, completed=done)
        if shown or loudness() == "quiet":
            yield Ticker(bar, task)
            return

        def line(seconds: float) -> str:
            now = int(bar.tasks[0].completed)
            left = seconds * (total - now) / (now - done) if now > done else None
            rest = "" if left is None else f", about {duration(left)} left"
            return f"{bar.tasks[0].description}: {now} of {total} steps, {duration(seconds)} so far{rest}"

        say(f"{text}: {total - done} steps")
        with _beats(line):
            yield Ticker(bar, task)
