"""What a command that computes nothing must not load: held by what is imported, which no busy machine changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# runs a command and prints what it loaded, behind all that the command printed
_CODE = """
import json, sys
from aatc_cli.__main__ import main
sys.argv = ["aatc", *json.loads(sys.argv[1])]
try: main()
except SystemExit as stop: code = stop.code
print(json.dumps([code, sorted({name for name in sys.modules})]))
"""
# what takes seconds to import; transformers alone takes two
HEAVY = {"torch", "transformers", "scipy", "matplotlib", "accelerate", "datasets", "huggingface_hub", "tokenizers"}
COMMANDS = {
    "inspect run": ["inspect", "RUN"],
    "inspect stats": ["inspect", "RUN/stats"],
    "inspect transform": ["inspect", "RUN/transforms/whiten", "--json"],
    "inspect plan": ["inspect", "RUN/plans/paper-3"],
    "inspect plan by budget": ["inspect", "--run", "RUN", "--budget", "3"],
    "inspect profile": ["inspect", "--profile", "llama-3.1-8b-instruct", "--budget", "2"],
    "whiten again": ["whiten", "--run", "RUN"],
    "allocate again": ["allocate", "--run", "RUN", "--budget", "3"],
    "allocate": ["allocate", "--run", "RUN", "--budget", "4", "--recipe", "var-only"],
    "check": ["allocate", "--check", "RUN/plans/paper-3"],
    "list": ["list", "recipes"],
    "version": ["--version"],
    "no artifact": ["inspect", "RUN/none"],
    "no stats": ["whiten", "--run", "RUN/none"],
    "no transform": ["allocate", "--run", "RUN/none", "--budget", "2"],
}
WRONG = (
    ["--no-such-option"],
    ["no-such-command"],
    ["allocate"],
    ["allocate", "--budget", "x"],
    ["whiten", "--percentile", "many"],
    ["inspect", "--context", "0"],
    ["eval", "--no-such-option"],
)


def loaded(arguments: list[str]) -> tuple[int, set[str]]:
    """Exit code of a command in a process of its own, and the modules it loaded."""
    command = [sys.executable, "-c", _CODE, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_command_on_files_loads_neither_torch_nor_transformers(run_folder: Path, arguments: list[str]) -> None:
    code, modules = loaded([argument.replace("RUN", str(run_folder)) for argument in arguments])
    assert code == (1 if "RUN/none" in arguments else 0)
    assert HEAVY & {name.split(".")[0] for name in modules} == set()
    assert not any(name.startswith("aatc_cli.models") for name in modules)


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["allocate", "--help"]], ids=" ".join)
def test_help_loads_the_command_line_alone(arguments: list[str]) -> None:
    code, modules = loaded(arguments)
    assert code == 0
    # the option parser takes pydantic for the options of a command; help of all commands does without
    heavy = HEAVY | {"numpy"} | ({"pydantic"} if arguments == ["--help"] else set())
    assert heavy & {name.split(".")[0] for name in modules} == set()
    # what it costs on any machine: some 60 of them are there when Python begins
    assert arguments != ["--help"] or len(modules) < 460
    # choices of options are names of methods, sub-commands those of tasks, options fields of settings
    rooms = {"__main__", "cli", "errors", "evals", "methods", "streams", "version"} | (
        set() if arguments == ["--help"] else {"config"}
    )
    assert {name.split(".")[1] for name in modules if name.startswith("aatc_cli.")} <= rooms


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_command_line_loads_nothing_heavy(arguments: list[str]) -> None:
    code, modules = loaded(arguments)
    assert code == 2
    assert HEAVY & {name.split(".")[0] for name in modules} == set()
