"""SIGKILL anywhere: what a reader accepts afterwards is whole, and the same command finishes the job."""

from __future__ import annotations

import itertools
import random
import signal
from pathlib import Path
from typing import Any

import pytest

# report, whose drawings take a second, is killed in fewer ways; what it writes is no artifact
COMMANDS = ("collect", "whiten", "allocate", "eval", "save")
SEED = 2026
WAYS = [*itertools.product(COMMANDS, (False, True)), ("report", True), ("study", False)]


@pytest.fixture
def crash(workshop: Any, tmp_path: Path) -> Any:
    """Run a command with a fault on a fresh copy of its inputs, and check what is left; whether it was hit."""

    def run(name: str, replacing: bool, **fault: Any) -> bool:
        place = tmp_path / "run"
        command = workshop.begin(name, place, replacing=replacing)
        ended = workshop.children.run(*command, folder=place, **fault)
        assert ended.code in (0, -signal.SIGKILL, -signal.SIGXFSZ), ended.err
        workshop.check(name, place, replacing=replacing)
        workshop.finish(name, place, command)
        return bool(ended.code)

    return run


@pytest.fixture
def calls(workshop: Any, tmp_path: Path) -> Any:
    """How often an undisturbed command asks the file system to change something, and how long it takes."""

    def count(name: str, replacing: bool) -> tuple[int, float]:
        command = workshop.begin(name, tmp_path / "count", replacing=replacing)
        ended = workshop.children.run(*command, folder=tmp_path / "count")
        assert ended.code == 0
        return ended.calls, ended.seconds

    return count


def test_twenty_kills(crash: Any, calls: Any) -> None:
    """A seeded sample of all below: calls of every command, moments of the clock, and writes cut short."""
    draw, hit = random.Random(SEED), 0
    for index, name in enumerate(COMMANDS):
        replacing = bool(index % 2)
        total, seconds = calls(name, replacing)
        for at in draw.sample(range(1, total + 1), 4 if name == "collect" else 3):
            assert crash(name, replacing, act="SIGKILL", at=at)
            hit += 1
        hit += crash(name, not replacing, after=draw.uniform(0, seconds / 2))
        if name not in ("collect", "eval"):
            assert crash(name, True, size=draw.randrange(8, 500), dies=True)
            hit += 1
    assert crash("study", False, act="SIGKILL", at=draw.randrange(1, calls("study", False)[0] + 1))
    assert hit >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replacing"), WAYS)
def test_a_kill_before_every_call_of_the_file_system(crash: Any, calls: Any, name: str, replacing: bool) -> None:
    total, _ = calls(name, replacing)
    assert total >= 5
    for at in range(1, total + 1):
        assert crash(name, replacing, act="SIGKILL", at=at), f"call {at} of {total} never came"


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_by_the_clock(crash: Any, calls: Any, name: str, replacing: bool) -> None:
    draw, hit = random.Random(f"{SEED} {name} {replacing}"), 0
    _, seconds = calls(name, replacing)
    # a kill that comes too late is none
    for _ in range(50):
        hit += crash(name, replacing, after=draw.uniform(0, seconds))
        if hit == 10:
            return
    raise AssertionError(f"{hit} of 50 kills came in time")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_kill_in_the_middle_of_a_write(crash: Any, workshop: Any, name: str) -> None:
    """The system kills the process when a file grows beyond a limit, so at every byte drawn."""
    draw, hit = random.Random(f"{SEED} {name}"), 0
    results = (workshop.new / workshop.results[name]).rglob("*")
    largest = max(path.stat().st_size for path in results if path.is_file())
    for _ in range(10):
        hit += crash(name, True, size=draw.randrange(8, largest), dies=True)
    assert hit == 10
