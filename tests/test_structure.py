"""The layers of the package: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aatc_cli

PACKAGE = Path(aatc_cli.__file__).parent
# the rooms from the street to the cellar: what stands in one line may import what stands in the lines below it, and its
# own room; a room that is missing here fails
LEVELS = (
    ("__main__",),
    ("__init__",),
    ("api",),
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


AXES = {"transform", "key_weight", "value_weight", "allocator", "quantizer", "coordinates", "curve", "pool", "tokens"}


def compared_axes(tree: ast.AST) -> set[str]:
    """Axes of a recipe that a module compares with names of choices, which only the choice itself may know."""
    found = set()
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        axes = {
            ast.unparse(side)
            for side in sides
            if isinstance(side, ast.Attribute) and side.attr in AXES and "recipe" in ast.unparse(side.value)
        }
        words = any(isinstance(leaf, ast.Constant) for side in sides for leaf in ast.walk(side))
        found |= axes if words else set()
    return found


@pytest.mark.parametrize(
    "file", [f for f in FILES if part_of(f) != "methods"], ids=lambda f: str(f.relative_to(PACKAGE))
)
def test_no_axis_is_compared_outside_methods(file: Path) -> None:
    assert compared_axes(ast.parse(file.read_text(encoding="utf-8"))) == set()


def test_a_compared_axis_would_be_seen() -> None:
    for text in ('recipe.allocator == "none"', 'plan.recipe.quantizer not in ("a", "b")', "recipe.tokens is None"):
        assert len(compared_axes(ast.parse(text))) == 1
    assert compared_axes(ast.parse('codec.quantizer == "uniform"; kind != recipe.transform')) == set()


@pytest.mark.parametrize("module", ["registry", "recipe", "axes"])
def test_methods_are_listed_without_torch(module: str) -> None:
    """Nothing that computes is imported before something is computed; the registry alone does without pydantic too."""
    heavy = {"torch", "transformers", "scipy"} | ({"numpy", "pydantic"} if module != "recipe" else set())
    code = (
        f"import sys; import aatc_cli.methods.{module}\n"
        "from aatc_cli.methods.registry import names; assert 'waterfill' in names('allocator')\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]"]


def test_allocation_loads_no_torch() -> None:
    """From energies to widths and bytes, for a recipe with classes of tokens and for one without."""
    code = (
        "import sys; import numpy as np\n"
        "from aatc_cli.config import Geometry, HeadGroups\n"
        "from aatc_cli.core.allocate import SiteEnergy\n"
        "from aatc_cli.profiles import load_recipe\n"
        "choices = load_recipe('paper').choices\n"
        "energies = [{side: SiteEnergy(np.ones(8), np.ones(8)) for side in 'kv'} for _ in range(8)]\n"
        "found = choices.allocate(energies, 2.0)\n"
        "geometry = Geometry(layers=8, heads=2, kv_heads=2, head_dim=4, hidden_size=8)\n"
        "bits = [{side: layer[side].tolist() for side in 'kv'} for layer in found.bits]\n"
        "assert choices.layout(geometry, HeadGroups.both(1), [bits]).bytes(512) > 0\n"
        "for name in ('loss-aware-tokens', 'kvquant', 'kvtc', 'palu'):\n"
        "    load_recipe(name).choices.nominal_layout(geometry, HeadGroups.both(1), 2.0)\n"
        "print(sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]"]


def test_only_models_import_transformers() -> None:
    users = {part_of(file) for file in FILES if any(name.split(".")[0] == "transformers" for name in imports(file))}
    assert users == {"models"}


def test_no_key_of_a_manifest_is_read_outside_artifacts() -> None:
    """Settings and results have fields there (`artifacts.stats`, `artifacts.transform`, `artifacts.plan`)."""
    read = re.compile(r"manifest\.(settings|results)(?!,$)|\b(settings|results)(\[|\.get\()[\"']")
    found = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in FILES
        if part_of(file) != "artifacts"
        for line in file.read_text(encoding="utf-8").splitlines()
        if read.search(line) and "lm_eval" not in file.parts
    ]
    assert found == []
