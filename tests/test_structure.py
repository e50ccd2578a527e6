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
    ("errors", "streams", "version"),
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
    used = {name.split(".")[1] for name in imports(file) if name.startswith("aatc_cli.")} - {part}
    assert {room for room in used if LEVEL[room] <= LEVEL[part]} == set()


MODULES = {str(file.relative_to(PACKAGE.parent).with_suffix("")).replace("/", "."): file for file in FILES}
MODULES = {name.removesuffix(".__init__"): file for name, file in MODULES.items()}
# what is a list of all methods
LISTS = {"methods/registry.py"}
# kernels, how they are launched and their twins have the arguments of the kernel
KERNELS = ("runtime/kernels/", "runtime/fused/reference.py", "evals/bench/float8_triton.py")


def modules_used(file: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it and for types too."""
    named = {name for name in imports(file) if name.startswith("aatc_cli.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in named} & set(MODULES)


def test_no_modules_need_each_other() -> None:
    """No circle of imports, not even of those inside of functions or for types alone."""
    left = {name: modules_used(file) - {name, "aatc_cli"} for name, file in MODULES.items() if name != "aatc_cli"}
    while free := {name for name, used in left.items() if not used & set(left)}:
        left = {name: used for name, used in left.items() if name not in free}
    assert set(left) == set()


def test_no_file_needs_many_others() -> None:
    used = {str(file.relative_to(PACKAGE)): len(modules_used(file)) for file in FILES}
    assert {name: count for name, count in used.items() if count >= 15 and name not in LISTS} == {}


def test_functions_are_read_on_one_screen() -> None:
    """No more than 60 lines and 8 parameters, beside self."""
    found = []
    for file in FILES:
        name = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or name.startswith(KERNELS):
                continue
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            count = len([one for one in parameters if one.arg not in ("self", "cls")])
            if count > 8 or (node.end_lineno or 0) - node.lineno >= 60:
                found.append(f"{name}: {node.name}")
    assert found == []


def test_a_folder_of_stages_is_seen_at_once() -> None:
    folders = [PACKAGE / "stages", *(path for path in (PACKAGE / "stages").rglob("*") if path.is_dir())]
    assert {folder.name: n for folder in folders if (n := len(list(folder.glob("*.py")))) > 15} == {}


AXES = {
    "transform",
    "key_weight",
    "value_weight",
    "allocator",
    "quantizer",
    "coordinates",
    "curve",
    "pool",
    "tokens",
    "prediction",
}


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
    """From energies to widths and bytes."""
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
        "for name in ('loss-aware', 'kvquant', 'kvtc', 'palu'):\n"
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
