"""Ctrl-C anywhere: exit code 130, one clean message, nothing half-written, and the same command finishes the job."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("collect", "whiten", "allocate", "eval", "report")
SEED = 2026


@pytest.fixture
def interrupt(workshop: Any, tmp_path: Path) -> Any:
    """Interrupt a command on a fresh copy of its inputs and check what it says and leaves; whether it was hit."""

    def run(name: str, replacing: bool, **fault: Any) -> bool:
        place = tmp_path / "run"
        command = workshop.begin(name, place, replacing=replacing)
        ended = workshop.children.run(*command, folder=place, **fault)
        assert ended.code in (0, 130), ended
        assert "Traceback" not in ended.err, ended.err
        if ended.code == 130:
            said = [line for line in ended.err.splitlines() if line.startswith(("Error: ", "Hint: "))]
            assert said == [
                "Error: interrupted",
                "Hint: run the same command again; collect continues from its last checkpoint",
            ]
            assert ended.out == ""
        workshop.check(name, place, replacing=replacing)
        workshop.finish(name, place, command)
        return ended.code == 130

    return run


def test_interrupts(interrupt: Any, workshop: Any, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    for name, replacing in (("collect", False), ("whiten", True), ("allocate", False), ("eval", True)):
        command = workshop.begin(name, tmp_path / "count", replacing=replacing)
        calls = workshop.children.run(*command, folder=tmp_path / "count").calls
        for at in draw.sample(range(1, calls - 1), 2):
            assert interrupt(name, replacing, act="SIGINT", at=at)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replacing"), itertools.product(COMMANDS[:-1], (False, True)))
def test_interrupts_before_every_call_of_the_file_system(
    interrupt: Any, workshop: Any, tmp_path: Path, name: str, replacing: bool
) -> None:
    command = workshop.begin(name, tmp_path / "count", replacing=replacing)
    calls = workshop.children.run(*command, folder=tmp_path / "count").calls
    # at the last calls old folders are being removed, where errors are not looked at and so an interrupt may pass
    hit = sum(interrupt(name, replacing, act="SIGINT", at=at) for at in range(1, calls + 1))
    assert hit >= calls - 6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replacing"), itertools.product(COMMANDS, (False, True)))
def test_interrupts_by_the_clock(interrupt: Any, workshop: Any, tmp_path: Path, name: str, replacing: bool) -> None:
    draw, hit = random.Random(f"{SEED} {name} {replacing}"), 0
    command = workshop.begin(name, tmp_path / "count", replacing=replacing)
    seconds = workshop.children.run(*command, folder=tmp_path / "count").seconds
    for _ in range(50):
        hit += interrupt(name, replacing, after=draw.uniform(0.02, seconds), signal_name="SIGINT")
        if hit == 10:
            return
    raise AssertionError(f"{hit} of 50 interrupts came in time")


def test_a_collect_that_was_interrupted_goes_on(workshop: Any, tmp_path: Path) -> None:
    """Not from its beginning: the second time fewer windows are run, and the result is the same."""
    place = tmp_path / "run"
    command = workshop.begin("collect", place, replacing=False)
    ended = workshop.children.run(*command, folder=place, act="SIGINT", at=60)
    assert ended.code == 130
    again = workshop.children.run(*command, folder=place)
    assert again.code == 0
    assert "collect: continuing from window" in again.err
    assert workshop.contents("collect", place) == workshop.after["collect"]
