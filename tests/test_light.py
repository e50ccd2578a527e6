"""What a CI job without torch can do, with numpy, safetensors, pydantic, typer and rich alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden" / "run"
# every other package that this one depends on
ABSENT = ("torch", "transformers", "scipy", "accelerate", "datasets", "gguf", "matplotlib", "jinja2", "huggingface_hub")
MAIN = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from aatc_cli.__main__ import main
main()
"""


@pytest.fixture
def light() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MAIN, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def test_check_of_the_golden_run(light: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = light("allocate", "--check", *sorted((GOLDEN / "plans").iterdir()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": identical (") == 2


def test_an_exported_plan(light: Callable[..., subprocess.CompletedProcess[str]], copied: Path, tmp_path: Path) -> None:
    exported = light("export", copied / "plans" / "loss-aware-3", tmp_path / "shipped")
    assert exported.returncode == 0, exported.stderr
    shutil.rmtree(copied)
    done = light("allocate", "--check", tmp_path / "shipped")
    assert (done.returncode, done.stderr) == (0, "")
    assert ": identical (" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "GOLDEN"),
        ("inspect", "GOLDEN/plans/paper-3"),
        ("inspect", "GOLDEN/transforms/metric"),
        ("inspect", "GOLDEN/plans/paper-3", "GOLDEN/plans/loss-aware-3"),
        ("inspect", "--profile", "llama-3.1-8b-instruct", "--budget", 2),
        ("allocate", "--run", "GOLDEN", "--budget", 3.5, "--budget", 4),
        ("list", "recipes"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_what_else_works(
    light: Callable[..., subprocess.CompletedProcess[str]], copied: Path, arguments: tuple[object, ...]
) -> None:
    done = light(*(str(each).replace("GOLDEN", str(copied)) for each in arguments))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_needs_more_says_so(light: Callable[..., subprocess.CompletedProcess[str]], copied: Path) -> None:
    done = light("collect", "--run", copied, "--model", copied)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["Error", "Hint"]
    assert lines[1].startswith("Hint: pip install ")
