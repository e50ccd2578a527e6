"""Seeded damage to every kind of artifact: refused with one clear error, or it means exactly what it meant before."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import resource
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import aatc_cli
from aatc_cli.artifacts.evaluation import read_evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.tensor_file import tensor_digest
from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import ModelProfile, load_model_profile, load_recipe, profiles_dir
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache

SPEC = importlib.util.spec_from_file_location("damage", Path(__file__).with_name("damage.py"))
assert SPEC is not None
assert SPEC.loader is not None
damages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(damages)
SEED = 2026
# more than a fuzz run takes, far less than what a header may claim
MEMORY = 400 << 20
KINDS = ("stats", "transform", "plan", "evaluation", "cache")


@dataclass(frozen=True)
class Shelf:
    """A run with every kind of artifact, and how each is read as a stage reads it."""

    run: Path
    session: Any
    evaluation: str

    def place(self, kind: str, run: Path) -> Path:
        """Where an artifact of a kind lies."""
        return (
            run
            / {
                "stats": "stats",
                "transform": "transforms/whiten",
                "plan": "plans/paper-3",
                "cache": "cache",
                "evaluation": f"evals/{self.evaluation}",
            }[kind]
        )

    def read(self, kind: str, run: Path) -> object:
        """All that a stage takes from an artifact, as plain data; raises what the readers raise."""
        path, place = self.place(kind, run), Run(run)
        if kind == "evaluation":
            return read_evaluation(path).model_dump_json()
        if kind == "cache":
            state = load_cache(self.session, path).state
            groups = [(group.rows, group.offset, group.length) for group in state.groups]
            return state.columns, groups, _bytes(state.tensors())
        if kind == "stats":
            opened = Stats.open(place.stats())
            for layer in range(opened.manifest.model.geometry.layers):
                opened.layer(layer)
        elif kind == "transform":
            opened = Transform.open(place.transform("whiten"))
            opened.energies()
            plan = Plan.open(self.place("plan", run))
            for layer in plan.codecs("cpu"):
                assert all(bool((layer[side].scale > 0).all()) for side in SIDES)
        else:
            opened = Plan.open(path)
        hashed = opened.manifest.model_dump(mode="json", exclude={"provenance"})
        return hashed, _bytes(dict(opened.artifact.tensors()))


def _bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    return {name: (str(tensor.dtype), tensor_digest(tensor)) for name, tensor in sorted(tensors.items())}


@pytest.fixture(scope="module")
def shelf(
    measured: Any, base_run: Path, tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:

    from aatc_cli.evals.subjects import Subject

    run = Path(shutil.copytree(base_run, tmp_path_factory.mktemp("shelf") / "run"))
    plan = Plan.open(run / "plans" / "paper-3")
    source = find_model(str(tiny_llama))
    [found] = measured("kl", Run(run), tiny_llama, [Subject(plan.recipe, plan)], text=[corpus], length=160, limit=1)
    model = load_model(source, dtype="bfloat16")
    with attach_codecs(model, plan.codecs("cpu"), plan.recipe.window) as session:
        cache = session.new_cache()
        ids, mask = torch.arange(2 * 170).view(2, 170) % 256, torch.ones(2, 170, dtype=torch.long)
        mask[0, :9] = 0
        with torch.no_grad():
            model(ids, attention_mask=mask, **{session.keyword: cache})
        save_cache(cache, session, run / "cache")
        yield Shelf(run, session, found.file_name)


def fuzz(shelf: Shelf, kind: str, count: int, scratch: Path) -> Counter[str]:
    """Damage copies of one artifact ``count`` times and read them; how many ended how."""
    draw, ended = random.Random(f"{SEED} {kind}"), Counter[str]()
    original = shelf.read(kind, shelf.run)
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    for number in range(count):
        run = scratch / "run"
        shutil.copytree(shelf.run, run)
        what, may = damages.damage(draw, kind, shelf.place(kind, run), elsewhere)
        note = f"{kind} {number}: {what}"
        try:
            found = shelf.read(kind, run)
        except AatcError as refusal:
            clear = bool(refusal.message) and bool(refusal.hint) and "\n" not in refusal.message.strip()
            ended["refused" if clear else f"{note} is not refused clearly: {refusal.message!r}"] += 1
        except BaseException as error:
            raise AssertionError(f"{note} ended in {type(error).__name__}") from error
        else:
            assert may != "refuse", f"{note} was accepted"
            assert may == "any" or found == original, f"{note} was read as something else"
            ended["same" if found == original else "other"] += 1
        shutil.rmtree(run)
    return ended


def peak() -> int:
    """The most memory that this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_means_the_same(shelf: Shelf, kind: str, tmp_path: Path) -> None:
    before = peak()
    ended = fuzz(shelf, kind, 40, tmp_path)
    assert set(ended) <= {"refused", "same", "other"}
    assert ended["refused"] >= 30
    assert peak() - before < MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_damage_is_refused_or_means_the_same(shelf: Shelf, kind: str, tmp_path: Path) -> None:
    before = peak()
    ended = fuzz(shelf, kind, 600, tmp_path)
    assert set(ended) <= {"refused", "same", "other"}
    assert ended["refused"] >= 450
    assert peak() - before < MEMORY


# profiles and recipes: what a user writes, so that another value is another profile and not a damaged one


def spoil(draw: random.Random, text: str) -> str:
    """A TOML text with one line gone, doubled, renamed or of another value, or some bytes of it changed."""
    lines = text.splitlines()
    place, how = draw.randrange(len(lines)), draw.choice(("bytes", "gone", "twice", "name", "value", "value"))
    junk = draw.choice(("nan", "inf", "-1", "0", "1.5", "true", '"x"', '"../../x"', "[]", "{}", "1e400", "9" * 30, ""))
    if how == "bytes":
        data = bytearray(text.encode())
        draw.choice(damages.BYTES[:-1])(draw, data)
        return data.decode("utf-8", "surrogateescape")
    if how == "gone":
        del lines[place]
    elif how == "twice":
        lines.insert(place, lines[place])
    else:
        key, _, value = lines[place].partition(" = ")
        lines[place] = f"{key}x = {value}" if how == "name" else f"{key} = {junk}"
    return "\n".join(lines)


def fuzz_profiles(count: int, scratch: Path) -> Counter[str]:
    """Spoil packaged profiles and recipes and read them; how many ended how."""
    draw, ended = random.Random(SEED), Counter[str]()
    for number in range(count):
        kind = draw.choice(("models", "recipes"))
        source = draw.choice(sorted((profiles_dir() / kind).glob("*.toml")))
        file = scratch / f"spoilt-{number}.toml"
        file.write_bytes(spoil(draw, source.read_text(encoding="utf-8")).encode("utf-8", "surrogateescape"))
        load = load_recipe if kind == "recipes" else load_model_profile
        try:
            found: Recipe | ModelProfile = load(str(file))
        except AatcError as refusal:
            ended["refused" if refusal.message and refusal.hint else f"{number} is not refused clearly"] += 1
            continue
        # what is accepted is within all bounds, and its name is no path
        assert type(found).model_validate_json(found.model_dump_json()) == found, number
        assert "/" not in found.name
        assert not found.name.startswith(".")
        ended["same" if found == load(str(source)) else "another"] += 1
    return ended


def test_spoilt_profiles(tmp_path: Path) -> None:
    ended = fuzz_profiles(60, tmp_path)
    assert set(ended) <= {"refused", "same", "another"}
    assert ended["refused"] >= 25


@pytest.mark.slow
def test_many_spoilt_profiles(tmp_path: Path) -> None:
    ended = fuzz_profiles(1000, tmp_path)
    assert set(ended) <= {"refused", "same", "another"}
    assert ended["refused"] >= 400


def test_nothing_is_pickled() -> None:
    """No file imports a serialiser that runs code, or calls torch.load (but for tensors) or torch.save."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for file in sorted(Path(aatc_cli.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not banned & {name.split(".")[0] for name in names}, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                # weights in .bin files: a reader that makes tensors and nothing else
                tensors = any(key.arg == "weights_only" and ast.unparse(key.value) == "True" for key in node.keywords)
                banned_call = re.fullmatch(r"(torch|np|numpy)\.(load|save)", called) is not None
                assert not banned_call or (called == "torch.load" and tensors), f"{file}: {called}"


# the same damage met by commands


def commands(kind: str, run: Path, model: Path, corpus: Path, evaluation: str) -> list[list[object]]:
    """Every command that reads an artifact of a kind."""
    evaluate = ["eval", "--run", run, "--model", model, "--text", corpus, "--length", 160, "--limit", 1, "--budget", 3]
    whole = [["inspect", "--run", run, "--json"], ["report", "--run", run, "--json"]]
    return (
        whole
        + {
            "stats": [
                ["whiten", "--run", run, "--force"],
                ["inspect", run / "stats", "--json"],
                ["whiten", "--run", run, "--transform", "pca"],
                ["whiten", "--run", run, "--percentile", 98],
            ],
            "transform": [
                ["allocate", "--run", run, "--budget", 4],
                ["inspect", run / "transforms" / "whiten", "--json"],
                ["allocate", "--check", run / "plans" / "paper-3"],
                evaluate,
                ["whiten", "--run", run],
            ],
            "plan": [
                ["inspect", "--plan", run / "plans" / "paper-3", "--json"],
                ["allocate", "--run", run, "--budget", 3],
                ["allocate", "--check", run / "plans" / "paper-3", "--json"],
                evaluate,
            ],
            "evaluation": [["inspect", run / "evals" / evaluation, "--json"], evaluate],
        }[kind]
    )


def meet(shelf: Shelf, count: int, aatc: Any, model: Path, corpus: Path, scratch: Path) -> int:
    """Damage artifacts and run a command on each: one error, or a result; how many commands failed."""
    draw, failed = random.Random(SEED), 0
    (scratch / "elsewhere").mkdir()
    for number in range(count):
        run = scratch / "run"
        shutil.copytree(shelf.run, run)
        kind = draw.choice(KINDS[:-1])
        what, _ = damages.damage(draw, kind, shelf.place(kind, run), scratch / "elsewhere")
        command = draw.choice(commands(kind, run, model, corpus, shelf.evaluation))
        note = f"{number}: {kind}: {what}: {' '.join(map(str, command))}"
        try:
            ended = aatc(*command)
        except BaseException as error:
            raise AssertionError(f"{note} ended in {type(error).__name__}") from error
        lines = [line.split(":")[0] for line in ended.err.splitlines() if line.startswith(("Error: ", "Hint: "))]
        if ended.code == 0 or ("--check" in command and ended.out):
            assert lines == [], note
        else:
            assert (ended.code, ended.out, lines) == (1, "", ["Error", "Hint"]), f"{note}: {ended}"
            failed += 1
        shutil.rmtree(run)
    return failed


def test_commands_meet_damage(shelf: Shelf, aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    assert meet(shelf, 60, aatc, tiny_llama, corpus, tmp_path) >= 30


@pytest.mark.slow
def test_commands_meet_much_damage(shelf: Shelf, aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    assert meet(shelf, 800, aatc, tiny_llama, corpus, tmp_path) >= 400
