"""Where output goes: data to stdout, progress and log to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# names of files and texts are printed as they are: brackets and colons in them are no markup
log = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def say(message: str) -> None:
    """One plain line of log on stderr."""
    log.print(message)


def print_json(data: Any) -> None:
    """Exactly one JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table for people on stdout; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width).print(table)


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


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner with the time passed, for work whose steps cannot be counted; nothing without a terminal."""
    if not log.is_terminal:
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(text), TimeElapsedColumn(), console=log, transient=True) as bar:
        bar.add_task(text, total=None)
        yield


@contextmanager
def progress(text: str, total: int, done: int = 0) -> Iterator[Ticker]:
    """A progress bar on stderr; without a terminal, plain lines at the start and the end."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=log,
        transient=False,
        disable=not log.is_terminal,
    )
    if not log.is_terminal:
        say(f"{text}: {total - done} steps")
    with bar:
        yield Ticker(bar, bar.add_task(text, total=total, completed=done))
