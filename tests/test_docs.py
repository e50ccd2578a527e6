"""The documentation cannot drift: its names, references, links, commands and snippets are checked against the code."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
from functools import reduce
from pathlib import Path

import pytest
import torch
import typer
import typer.cli
import typer.main
import yaml

import aatc_cli
from aatc_cli.artifacts.artifact import ArtifactWriter
from aatc_cli.artifacts.evaluation import DistortionRow, Evaluation
from aatc_cli.artifacts.manifest import Manifest, ModelIdentity, TensorEntry, TextRecord
from aatc_cli.cli import app
from aatc_cli.config import Budget, Geometry, HeadGroups, Window
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.stats import LayerStats
from aatc_cli.evals.memory.result import MemoryRow
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.result import SpeedCheck, SpeedMemory, SpeedRates, SpeedRow
from aatc_cli.methods.fields import Protection
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import available, load_model_profile, load_recipe
from aatc_cli.stages.inspecting.stats_size import stats_bytes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CI = DOCS / "ci.md"


def book(name: str) -> str:
    """Text of a page and of those in the folder of its name."""
    return "\n".join(page.read_text("utf-8") for page in (DOCS / f"{name}.md", *sorted((DOCS / name).glob("*.md"))))


MATH, FORMAT, PIPELINE = (book(name) for name in ("math", "format", "pipeline"))
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
REFERENCE = re.compile(r"(aatc_cli/[\w/]+\.py): ([A-Za-z_][\w.]*)")
COMMANDS = (
    *("collect", "whiten", "allocate", "inspect", "eval", "study", "report", "pick", "export", "cache", "advise"),
    *("list", "doctor", "serve"),
)
# words that start or separate commands in the shell; a command line ends at the first of the separators
STARTERS = {"do", "then", "$", "@"}
SEPARATORS = re.compile(r"[|&;<>()]+")


def fences(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks in these languages."""
    return [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if language in languages]


def aatc_commands(block: str) -> list[list[str]]:
    """Arguments of every ``aatc`` command in a shell or make block, variables replaced by their names."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        plain = re.sub(r"\$\((\w+)\)|\$\$?\{?(\w+)\}?|\$[*<@]", lambda m: m[1] or m[2] or "1", line)
        lexer = shlex.shlex(plain, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] | None = None
        expected = True  # whether the next word is the name of a command
        for word in lexer:
            if SEPARATORS.fullmatch(word):
                command, expected = None, True
            elif command is not None:
                command.append(word)
            elif expected and word == "aatc":
                command = []
                found.append(command)
            elif word not in STARTERS and not re.fullmatch(r"\w+=.*", word):
                expected = False
    return found


def parse(arguments: list[str]) -> None:
    """Parse a command line as the tool does, to the last option, and run nothing."""
    group = typer.main.get_command(app)
    context = group.make_context("aatc", list(arguments))
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            break


def slugs(page: Path) -> set[str]:
    """Anchors of the headings of a Markdown page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def named(text: str, name: str) -> bool:
    return f"`{name}`" in text


@pytest.mark.parametrize("name", [*available("recipes"), *available("models")])
def test_every_profile_is_documented(name):
    assert named(PIPELINE, name)


@pytest.mark.parametrize("name", available("recipes"))
def test_recipe_table_states_the_axes(name):
    # a task may have the name of a recipe, on another page
    page = (DOCS / "pipeline" / "recipes.md").read_text("utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` | "))
    recipe = load_recipe(name)
    protect = recipe.protect
    extras = f" (+{protect.key_extra:g}, +{protect.value_extra:g})" if protect.layers else ""
    normalised = "no" if recipe.normalize_percentile is None else f"{recipe.normalize_percentile:g}th percentile"
    axes = (recipe.transform, recipe.key_weight, recipe.value_weight, recipe.allocator, normalised)
    assert row == f"| `{name}` | {' | '.join(axes)} | {protect.layers}{extras} |"


@pytest.mark.parametrize("name", available("models"))
def test_model_table_states_the_geometry(name):
    profile = load_model_profile(name)
    g = profile.geometry
    row = f"| `{name}` | {g.layers} | {g.heads} | {g.kv_heads} | {g.head_dim} | {profile.head_groups} | "
    assert row in PIPELINE


def test_code_references_resolve():
    references = REFERENCE.findall(MATH)
    assert len(references) > 50
    for file, name in references:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        found = reduce(getattr, name.split("."), module)
        assert inspect.isfunction(found) or inspect.isclass(found), f"{file}: {name}"


def test_a_wrong_code_reference_would_be_seen():
    assert REFERENCE.findall("see `aatc_cli/core/layout.py: CacheLayout.ratio`, ...") == [
        ("aatc_cli/core/layout.py", "CacheLayout.ratio")
    ]
    with pytest.raises(AttributeError):
        reduce(getattr, ["CacheLayout", "ration"], importlib.import_module("aatc_cli.core.layout"))


def test_all_of_the_mathematics_is_documented():
    described = set(REFERENCE.findall(MATH))
    missing = []
    for path in sorted((Path(aatc_cli.__file__).parent / "core").glob("*.py")):
        module = importlib.import_module(f"aatc_cli.core.{path.stem}".removesuffix(".__init__"))
        for name, thing in vars(module).items():
            own = getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
            if own and (inspect.isfunction(thing) or inspect.isclass(thing)):
                file = f"aatc_cli/core/{path.name}"
                missing += [] if (file, name) in described else [f"{file}: {name}"]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name) if name else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in slugs(place), f"{page.name}: {target}"


def test_documented_commands_parse():
    commands = []
    for text in (MATH, FORMAT, PIPELINE, (DOCS / "tutorial.md").read_text("utf-8")):
        for block in fences(text, "console", "bash", "sh", "make"):
            commands += aatc_commands(block)
    for arguments in commands:
        parse(arguments)
    assert len(commands) > 30
    assert {arguments[0] for arguments in commands} == set(COMMANDS)


def test_the_example_of_a_ci_job():
    """It is YAML of the form that GitHub reads, and all of its steps are commands that there are."""
    text = CI.read_text("utf-8")
    [block] = fences(text, "yaml")
    workflow = yaml.safe_load(block)
    # YAML 1.1 reads a bare on as true
    assert workflow.keys() == {"name", True, "permissions", "jobs"}
    assert set(workflow[True]) <= {"push", "pull_request", "schedule"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "steps"} <= job.keys() <= {"runs-on", "steps", "timeout-minutes"}
        for step in job["steps"]:
            assert step.keys() in ({"run"}, {"uses"}, {"uses", "with"})
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    scripts += fences(text, "sh", "console")
    commands = [arguments for script in scripts for arguments in aatc_commands(script)]
    for arguments in commands:
        parse(arguments)
    assert [arguments[0] for arguments in commands].count("allocate") == 4
    for script in scripts:
        plain = re.sub(r"^\$ ", "", script, flags=re.M)
        assert subprocess.run(["sh", "-n"], input=plain, text=True, check=False).returncode == 0, script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    named_targets = re.findall(r"\bmake ([a-z-]+)", text)
    assert {"golden", "golden-check"} <= set(named_targets) <= set(targets)


def test_commands_are_found_in_shell_and_make():
    block = (
        'set -e\nexport AATC_RUN=a\nfor p in b/*; do aatc allocate --check "$p"; done\n'
        "\taatc whiten --run $(RUN) \\\n  --force"
    )
    assert aatc_commands(block) == [["allocate", "--check", "p"], ["whiten", "--run", "RUN", "--force"]]
    assert aatc_commands("$ X=1 aatc inspect --json | jq . && aatc report > out") == [["inspect", "--json"], ["report"]]
    assert aatc_commands("echo aatc nothing  # aatc whiten") == []


@pytest.mark.parametrize(
    "line", ["allocate --buget 2", "allocate --budget two", "eval warp", "pack", "collect --samples 0", "whiten x"]
)
def test_a_wrong_command_would_be_seen(line):
    with pytest.raises(typer.BadParameter.__mro__[1]):
        parse(line.split())


def test_every_command_has_a_section():
    assert set(COMMANDS) == set(typer.main.get_command(app).commands)
    headings = re.findall(r"^## (\w+)$", PIPELINE, re.M)
    assert sorted(name for name in headings if name in COMMANDS) == sorted(COMMANDS)


def test_every_environment_variable_is_documented():
    files = [*Path(aatc_cli.__file__).parent.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    variables = {name for file in files for name in re.findall(r"\bAATC_[A-Z_]+\b", file.read_text("utf-8"))}
    assert {"AATC_RUN", "AATC_MODEL"} <= variables
    assert [name for name in sorted(variables) if not named(PIPELINE, name)] == []


def test_command_reference_is_current(monkeypatch):
    """docs/cli.md is what ``make docs`` writes."""
    monkeypatch.delenv("AATC_RUN", raising=False)
    group = typer.main.get_group(app)
    context = typer.Context(group)
    context.obj = {typer.cli.MARKUP_MODE_KEY: app.rich_markup_mode}
    written = typer.cli.get_docs_for_click(obj=group, ctx=context, name="aatc").strip() + "\n"
    assert (DOCS / "cli.md").read_text("utf-8") == written, "run make docs"


@pytest.mark.parametrize(
    "model",
    [
        Manifest,
        ModelIdentity,
        Geometry,
        TextRecord,
        TensorEntry,
        Recipe,
        Protection,
        Window,
        Budget,
        Evaluation,
        DistortionRow,
        MemoryResult,
        MemoryRow,
        SpeedResult,
        SpeedRow,
        SpeedCheck,
        SpeedRates,
        SpeedMemory,
    ],
    ids=lambda model: model.__name__,
)
def test_every_field_on_disk_is_documented(model):
    assert [field for field in model.model_fields if not named(FORMAT, field)] == []


def test_every_tensor_of_stats_is_documented():
    assert [name for name in LayerStats.TENSORS if not named(FORMAT, name)] == []


def test_digest_snippet_recomputes_the_digest(tmp_path):
    [snippet] = fences(FORMAT, "python")
    assert len(snippet.splitlines()) == 5
    geometry = Geometry(layers=1, heads=2, kv_heads=1, head_dim=2, hidden_size=4)
    model = ModelIdentity(
        name="modèle",
        revision=None,
        architecture="llama",
        config_hash="a",
        weights_fingerprint="b",
        tokenizer_hash="c",
        geometry=geometry,
    )
    with ArtifactWriter(tmp_path / "stats", "stats") as writer:
        writer.add("x", torch.arange(3.0))
        writer.commit(settings={"rate": 1e-7, "weight": 2.0}, model=model, provenance={"device": "cpu"})
    exec(snippet, {"folder": tmp_path / "stats"})
    manifest = tmp_path / "stats" / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"weight": 2.0', '"weight": 2.5'), "utf-8")
    with pytest.raises(AssertionError):
        exec(snippet, {"folder": tmp_path / "stats"})


def test_papers_compression_table_is_the_byte_law():
    rows = re.findall(
        r"^\| (Llama-3\.1-8B|Qwen2\.5-7B)-Instruct \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", MATH, re.M
    )
    assert len(rows) == 10
    for name, bits, paper, ours, share in rows:
        profile = load_model_profile(f"{name.lower()}-instruct")
        groups = HeadGroups.both(profile.head_groups)
        ratio = CacheLayout.nominal(profile.geometry, Window(), groups, float(bits)).ratio(8192)
        assert f"{ratio:.3f}" == ours
        assert f"{ratio / float(paper):.3f}" == share


def test_worked_example_is_the_byte_law():
    profile = load_model_profile("llama-3.1-8b-instruct")
    layout = CacheLayout.nominal(profile.geometry, Window(), HeadGroups.both(profile.head_groups), 2.5)
    causes = layout.breakdown(8192) | {f"static: {k}": v for k, v in layout.static_breakdown().items()}
    rows = {
        "**total**": f"**{layout.bytes(8192):,}**",
        "float16 cache": f"{layout.reference_bytes(8192):,}",
        **{cause: f"{count:,}" for cause, count in causes.items()},
    }
    text = MATH
    for cause, count in rows.items():
        assert re.search(rf"^\| {re.escape(cause)} \| .* \| {re.escape(count)} \|$", text, re.M), cause


def test_memory_of_the_largest_profile_is_as_stated():
    page = " ".join(PIPELINE.split())
    stated = re.search(r"For Llama 3\.1 70B \(80 layers, 1024 channels\) the sums and rows take ([\d.]+) GB", page)
    geometry = load_model_profile("llama-3.1-70b-instruct").geometry
    assert (geometry.layers, geometry.channels) == (80, 1024)
    assert f"{stats_bytes(geometry) / 1e9:.2f}" == stated[1]
