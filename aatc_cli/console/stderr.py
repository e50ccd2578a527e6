"""Log of a command on stderr, and how much of it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console

Loudness = Literal["quiet", "usual", "verbose"]

# names of files and texts are printed as they are: brackets and colons in them are no markup
log = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
_chosen: list[Loudness] = ["usual"]


def set_loudness(loudness: Loudness) -> None:
    """What the options -q and -v of a command say; it holds for the rest of the process."""
    _chosen[0] = loudness


def loudness() -> Loudness:
    """How much log is wanted: ``quiet`` is errors alone, ``verbose`` adds what `detail` says."""
    return _chosen[0]


@contextmanager
def hushed() -> Iterator[None]:
    """While the block lasts nothing is logged: for stages that run as a step of something else."""
    before = loudness()
    set_loudness("quiet")
    try:
        yield
    finally:
        set_loudness(before)


def say(message: str) -> None:
    """One plain line of log on stderr; nothing under -q."""
    if loudness() != "quiet":
        log.print(message)


def detail(message: str) -> None:
    """One plain line of log on stderr that only -v asks for."""
    if loudness() == "verbose":
        log.print(message)
