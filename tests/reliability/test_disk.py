"""A disk that is full or only to be read, and two processes on one run: one clear error, old artifacts untouched."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("collect", "whiten", "allocate", "eval", "save")
# bytes that what is said on stderr, a file here, takes itself
LEAST = 800


def clear(ended: Any) -> str:
    """The one error line of a command that failed as it should."""
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    assert ended.code == 1, ended
    assert len(errors) == len([line for line in lines if line.startswith("Hint: ")]) == 1, ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    return errors[0]


def state(pid: int) -> str:
    """One letter: T stopped, S asleep, R running."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_stopped(pid: int) -> None:
    """Wait until a child met its SIGSTOP."""
    for _ in range(3000):
        if state(pid) == "T":
            return
        time.sleep(0.01)
    raise AssertionError("it was never stopped")


def wait_until_asleep(pid: int) -> None:
    """Wait until a child only waits: asleep whenever one looks."""
    calm = 0
    for _ in range(3000):
        calm = calm + 1 if state(pid) == "S" else 0
        if calm == 20:
            return
        time.sleep(0.01)
    raise AssertionError("it never waited")


def refused(workshop: Any, name: str, place: Path, **fault: Any) -> bool:
    """Run a command over older results on a disk that takes no more; whether it was refused, with nothing touched."""
    command = workshop.begin(name, place, replacing=True)
    ended = workshop.children.run(*command, folder=place, **fault)
    if ended.code == 0:
        return False
    error = clear(ended)
    assert any(reason in error for reason in ("too large", "No space", "Read-only", "Permission denied")), error
    found, before, after = workshop.contents(name, place), workshop.before[name], workshop.after[name]
    assert found.keys() == before.keys()
    # of several plans the first may have been done
    assert all(content in (before[path], after[path]) for path, content in found.items())
    assert [path for path in workshop.litter(place) if ".partial" not in path] == []
    workshop.finish(name, place, command)
    return True


@pytest.mark.parametrize("name", COMMANDS)
def test_files_may_not_grow(workshop: Any, tmp_path: Path, name: str) -> None:
    """Writing beyond a limit fails as on a full disk, at a byte that is drawn."""
    draw = random.Random(name)
    largest = max(path.stat().st_size for path in (workshop.new / workshop.results[name]).rglob("*") if path.is_file())
    assert refused(workshop, name, tmp_path / "run", size=draw.randrange(LEAST, largest))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_files_may_not_grow_anywhere(workshop: Any, tmp_path: Path, name: str) -> None:
    draw = random.Random(f"{name} more")
    largest = max(path.stat().st_size for path in (workshop.new / workshop.results[name]).rglob("*") if path.is_file())
    for _ in range(15):
        assert refused(workshop, name, tmp_path / "run", size=draw.randrange(LEAST, largest))


@pytest.fixture
def mounted() -> Iterator[Any]:
    """Mounts a small file system of its own; skips where that is not allowed."""
    made: list[Path] = []

    def mount(size: int) -> Path:
        folder = Path(tempfile.mkdtemp())
        made.append(folder)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system is not allowed here")
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", str(folder)], capture_output=True)
        folder.rmdir()


@pytest.mark.parametrize("name", ["whiten", "save"])
def test_a_full_disk(workshop: Any, mounted: Any, name: str) -> None:
    """A true file system that has room for the inputs and the older results, but not for the new ones beside them."""
    place = mounted(8192) / "run"
    command = workshop.begin(name, place, replacing=True)
    fill = place.parent / "fill"
    free = shutil.disk_usage(place).free
    fill.write_bytes(bytes(max(0, free - 8192)))
    assert "No space left on device" in clear(workshop.children.run(*command, folder=place))
    assert workshop.contents(name, place) == workshop.before[name]
    assert workshop.litter(place) == []
    fill.unlink()
    workshop.finish(name, place, command)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_fills_up(workshop: Any, mounted: Any, name: str) -> None:
    """Every size from a page on until the command has room enough."""
    place = mounted(8192) / "run"
    for pages in range(200):
        command = workshop.begin(name, place, replacing=True)
        fill = place.parent / "fill"
        fill.write_bytes(bytes(max(0, shutil.disk_usage(place).free - 4096 * (pages * (pages + 1) // 2))))
        ended = workshop.children.run(*command, folder=place)
        if ended.code == 0:
            assert pages >= 1
            return
        clear(ended)
        assert all(
            c in (workshop.before[name][p], workshop.after[name][p]) for p, c in workshop.contents(name, place).items()
        )
        fill.unlink()
        workshop.finish(name, place, command)
    raise AssertionError("it never had room enough")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_system_that_refuses_writes(workshop: Any, tmp_path: Path, name: str) -> None:
    """Every opening for writing, renaming and making in the run fails as on a file system mounted read-only."""
    assert refused(workshop, name, tmp_path / "run", act="read-only")


def test_a_file_system_mounted_read_only(workshop: Any, mounted: Any) -> None:
    folder = mounted(8192)
    place = folder / "run"
    command = workshop.begin("whiten", place, replacing=True)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    assert "Read-only file system" in clear(workshop.children.run(*command, folder=place))
    assert workshop.children.run("inspect", "--run", place, "--json", folder=place).code == 0
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    workshop.finish("whiten", place, command)


def test_folders_of_somebody_else(workshop: Any) -> None:
    """A user who is not root, in folders that nobody may write to: true permissions."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        place = Path(name) / "run"
        for stage, folder in (("whiten", "run"), ("allocate", "run/plans"), ("save", "run")):
            command = workshop.begin(stage, place, replacing=stage != "save")
            for path in [place, *place.rglob("*")]:
                path.chmod(0o777 if path.is_dir() else 0o666)
            (Path(name) / folder).chmod(0o555)
            assert "Permission denied" in clear(workshop.children.run(*command, folder=place, user=True))
            for path in [place, *place.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            workshop.finish(stage, place, command)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("collect", "stats"),
        ("whiten", "transforms"),
        ("allocate", "plans"),
        ("eval", "evals"),
        ("report", "report"),
        ("save", "cache"),
    ],
)
def test_a_file_in_place_of_a_folder(workshop: Any, tmp_path: Path, name: str, at: str) -> None:
    command = workshop.begin(name, tmp_path / "run", replacing=False)
    (tmp_path / "run" / at).write_text("not a folder")
    if name == "save":
        command = ["save", tmp_path / "run" / "cache" / "inner"]
    clear(workshop.children.run(*command, folder=tmp_path))
    assert (tmp_path / "run" / at).read_text() == "not a folder"


@pytest.mark.parametrize("name", ["collect", "whiten", "allocate"])
def test_a_second_writer_is_refused_by_name(workshop: Any, tmp_path: Path, name: str) -> None:
    """The first is stopped where it holds the lock; the second names it, and then the first goes on."""
    place = tmp_path / "run"
    command = workshop.begin(name, place, replacing=False)
    first = workshop.children.start(*command, folder=place, act="SIGSTOP", at=6)
    wait_until_stopped(first)
    error = clear(workshop.children.run(*command, folder=place))
    assert error == f"Error: {place} is being written by process {first}"
    os.kill(first, signal.SIGCONT)
    assert workshop.children.end(first).code == 0
    workshop.finish(name, place, command)


@pytest.mark.parametrize("name", ["eval", "save", "report"])
def test_a_second_writer_waits(workshop: Any, tmp_path: Path, name: str) -> None:
    """What is written in a moment is waited for."""
    place = tmp_path / "run"
    command = workshop.begin(name, place, replacing=False)
    first = workshop.children.start(*command, folder=place, act="SIGSTOP", at=4)
    wait_until_stopped(first)
    second = workshop.children.start(*command, folder=place)
    wait_until_asleep(second)
    os.kill(first, signal.SIGCONT)
    assert workshop.children.end(first).code == 0
    assert workshop.children.end(second).code == 0
    workshop.finish(name, place, command)


def test_a_killed_holder_holds_nothing(workshop: Any, tmp_path: Path) -> None:
    place = tmp_path / "run"
    command = workshop.begin("allocate", place, replacing=False)
    first = workshop.children.start(*command, folder=place, act="SIGSTOP", at=6)
    wait_until_stopped(first)
    os.kill(first, signal.SIGKILL)
    assert workshop.children.end(first).code == -signal.SIGKILL
    assert (place / ".lock").read_text() == str(first)
    workshop.finish("allocate", place, command)
