"""-q and -v on every command, and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from aatc_cli.cli import app
from aatc_cli.console import set_loudness


@pytest.fixture(autouse=True)
def usual_again() -> Any:
    yield
    set_loudness("usual")


def commands(group: Any, *path: str) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found += commands(command, *path, name) if hasattr(command, "commands") else [(*path, name)]
    return found


@pytest.mark.parametrize("command", commands(typer.main.get_command(app)), ids=" ".join)
def test_every_command_has_both(aatc: Any, command: tuple[str, ...]) -> None:
    assert all(flag in aatc(*command, "--help").out for flag in ("--quiet", "--verbose"))
    refused = aatc(*command, "-q", "-v")
    assert refused.code in (1, 2)
    assert refused.err.startswith("Error: ")


def test_quiet_is_quiet_and_still_gives_data(aatc: Any, run_folder: Path) -> None:
    usual = aatc("allocate", "--run", run_folder, "--budget", 4)
    assert "allocate: paper 4" in usual.err
    quiet = aatc("allocate", "--run", run_folder, "--budget", 5, "-q")
    assert (quiet.code, quiet.err) == (0, "")
    assert "paper-5" in quiet.out
    # and it is over with the command
    assert "nothing to do" in aatc("allocate", "--run", run_folder, "--budget", 5).err


def test_verbose_says_what_is_read(aatc: Any, run_folder: Path) -> None:
    usual = aatc("inspect", "--run", run_folder, "--budget", 3)
    assert usual.err == ""
    told = aatc("inspect", "--run", run_folder, "--budget", 3, "-v")
    assert f"read plan {run_folder / 'plans' / 'paper-3'} (" in told.err
    assert told.out == usual.out


def test_quiet_keeps_errors(aatc: Any, tmp_path: Path) -> None:
    assert aatc("whiten", "--run", tmp_path, "-q").err.startswith("Error: there is no stats")


def test_completion() -> None:
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        variables = {"_AATC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        run = "from aatc_cli.__main__ import main; import sys; sys.argv = ['aatc']; main()"
        done = subprocess.run([sys.executable, "-c", run], env=os.environ | variables, capture_output=True, text=True)
        return done.stdout.split()

    assert "collect" in completed("aatc co")
    assert "--budget" in completed("aatc allocate --bud")
    assert "kl" in completed("aatc eval k")
    assert {"paper", "paper-fused"} <= set(completed("aatc allocate --recipe pap"))
    assert "llama-3.1-8b-instruct" in completed("aatc inspect --profile llama-3.1")
