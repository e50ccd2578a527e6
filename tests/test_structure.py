"""The layers of the package: who may import whom, and what a command line that only prints help must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import aatc_cli

PACKAGE = Path(aatc_cli.__file__).parent
# the rooms from the street to the cellar: what stands in one line may import what stands in the lines below it, and its
# own room; a room that is missing here fails
LEVELS = (
    ("__main__",),
    ("cli",),
    ("studies",),
    ("stages",),
    ("report",),
    ("evals", "serve"),
    ("runtime",),
    ("models", "text"),
    ("artifacts",),
    ("profiles",),
    ("methods",),
    ("core",),
    ("config", "console"),
    ("errors",),
    ("__init__",),
)
LEVEL = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    part = part_of(file)
    used = {name.split(".")[1] for name in imports(file) if name.startswith("aatc_cli.")} - {part, "__version__"}
    assert {room for room in used if LEVEL[room] <= LEVEL[part]} == set()


def test_only_models_import_transformers() -> None:
    users = {part_of(file) for file in FILES if any(name.split(".")[0] == "transformers" for name in imports(file))}
    assert users == {"models"}


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['aatc', '--help']\n"
        "from aatc_cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'datasets', 'matplotlib', 'pydantic'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "collect" in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded: []"


def test_help_is_instant() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "aatc_cli", "--help"], capture_output=True, check=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.5
