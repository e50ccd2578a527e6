"""Seeded damage to every kind of artifact: refused with one clear error, or it means exactly what it meant before."""

from __future__ import annotations

import json
import os
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
from safetensors.torch import load_file, save_file

from aatc_cli.artifact import MANIFEST, TENSORS, digest_of, open_artifact, tensor_digest
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.evals.schema import read_evaluation
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.cache_file import load_cache, save_cache
from aatc_cli.runtime.session import compressed
from aatc_cli.stages.files import (
    Run,
    load_codecs,
    load_energies,
    load_layer_stats,
    open_plan,
    open_stats,
    transform_of,
)  # fmt: skip

SEED = 2026
# more than a fuzz run takes, far less than what a header may claim
MEMORY = 400 << 20
KINDS = ("stats", "transform", "plan", "evaluation", "cache")
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**70,
    0.5,
    -0.5,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    [],
    [1],
    {},
    {"x": 1},
)


@dataclass(frozen=True)
class Shelf:
    """A run with every kind of artifact, and how each is read as a stage reads it."""

    run: Path
    session: Any

    def place(self, kind: str, run: Path) -> Path:
        """Where an artifact of a kind lies."""
        return run / {
            "stats": "stats", "transform": "transforms/whiten", "plan": "plans/paper-3", "cache": "cache",
            "evaluation": "evals/kl.paper-3.corpus.txt.160-80.json",
        }[kind]  # fmt: skip

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
            opened = open_stats(place.stats())
            for layer in range(opened.manifest.model.geometry.layers):
                load_layer_stats(opened, layer)
        elif kind == "transform":
            opened = open_artifact(place.transform("whiten"), "transform")
            load_energies(opened)
            plan = open_plan(self.place("plan", run))
            for layer in load_codecs(plan, transform_of(plan), "cpu"):
                assert all(bool((layer[side].scale > 0).all()) for side in SIDES)
        else:
            opened = open_plan(path).artifact
        hashed = opened.manifest.model_dump(mode="json", exclude={"provenance"})
        return hashed, _bytes(dict(opened.tensors()))


def _bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    return {name: (str(tensor.dtype), tensor_digest(tensor)) for name, tensor in sorted(tensors.items())}


@pytest.fixture(scope="module")
def shelf(base_run: Path, tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from aatc_cli.stages.evaluate import EvalSettings, evaluate
    from aatc_cli.stages.subjects import EvalOptions, Subject

    run = Path(shutil.copytree(base_run, tmp_path_factory.mktemp("shelf") / "run"))
    plan = open_plan(run / "plans" / "paper-3")
    settings = EvalSettings("kl", length=160, limit=1)
    source = find_model(str(tiny_llama))
    evaluate(Run(run), source, [Subject(plan.recipe, plan)], [str(corpus)], settings, EvalOptions())
    model = load_model(source, dtype="bfloat16")
    with compressed(model, load_codecs(plan, transform_of(plan), "cpu"), plan.recipe.window) as session:
        cache = session.new_cache()
        ids, mask = torch.arange(2 * 170).view(2, 170) % 256, torch.ones(2, 170, dtype=torch.long)
        mask[0, :9] = 0
        with torch.no_grad():
            model(ids, attention_mask=mask, **{session.keyword: cache})
        save_cache(cache, session, run / "cache")
        yield Shelf(run, session)


# damage to a file as it lies on the disk


def _flip(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 16))):
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)


def _truncate(draw: random.Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(draw: random.Random, data: bytearray) -> None:
    place = draw.choice((0, len(data), draw.randrange(len(data))))
    data[place:place] = draw.randbytes(draw.choice((1, 8, 100)))


def _blank(draw: random.Random, data: bytearray) -> None:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice((1, 8, 512)))
    data[start:stop] = bytes(stop - start)


def _shuffle(draw: random.Random, data: bytearray) -> None:
    size = draw.choice((1, 4, 64))
    a, b = (draw.randrange(max(1, len(data) - size)) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _header(draw: random.Random, data: bytearray) -> None:
    """The length of a safetensors header is a lie; in another file some first bytes are."""
    length = draw.choice((0, 1, 2**63 - 1, 2**64 - 1, 10**8, 10**8 + 1, len(data), draw.randrange(2**40)))
    data[:8] = length.to_bytes(8, "little")


BYTES = (_flip, _truncate, _insert, _blank, _shuffle, _header)


def damage_file(draw: random.Random, file: Path, elsewhere: Path) -> str:
    """Damage one file: its bytes, or what lies in its place."""
    what = draw.random()
    if what < 0.06:
        # the right content, but out of the run: to accept it is to have followed the link
        shutil.copy(file, elsewhere)
        file.unlink()
        file.symlink_to(draw.choice((str(elsewhere), os.path.relpath(elsewhere, file.parent))))
        return f"{file.name} is a link"
    if what < 0.1:
        file.unlink()
        how = draw.choice(("absent", "folder", "pipe"))
        {"absent": lambda: None, "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}[how]()
        return f"{file.name} is {how}"
    if what < 0.12:
        with file.open("r+b") as handle:
            handle.truncate(1 << 40)
        return f"{file.name} is a terabyte of holes"
    data, change = bytearray(file.read_bytes()), draw.choice(BYTES)
    change(draw, data)
    file.write_bytes(data)
    return f"{file.name}: {change.__name__}"


# damage to what is recorded, and a digest that agrees with it


def _paths(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [where] * bool(where) + [path for key, value in inner for path in _paths(value, (*where, key))]


def damage_record(draw: random.Random, raw: dict[str, Any]) -> str:
    """Remove, add, rename or re-type one field anywhere in a record, or one of every kind of claim."""
    # a field of the top first: there are many more entries of tensors than of all else
    field = draw.choice([key for key in raw if key != "digest"])
    path = draw.choice(_paths({field: raw[field]}))
    owner: Any = raw
    for step in path[:-1]:
        owner = owner[step]
    old, how = owner[path[-1]], draw.choice(("remove", "junk", "add", "rename", "number", "text"))
    if how == "remove":
        owner.pop(path[-1])
    elif how == "add" and isinstance(old, dict):
        old["../../../surprise"] = draw.choice(JUNK)
    elif how == "rename" and isinstance(owner, dict):
        owner[draw.choice(("/etc/passwd", "../x", "", path[-1] + " "))] = owner.pop(path[-1])
    elif how == "number" and isinstance(old, int | float) and not isinstance(old, bool):
        owner[path[-1]] = draw.choice((-old - 1, old + 1, old * 2 + 3, 2**40, float(old) + 0.25))
    elif how == "text" and isinstance(old, str):
        owner[path[-1]] = draw.choice((old + "x", old[:-1] + "\u0000", "0" * 64, f"../../{old}", old.upper() + "é"))
    else:
        owner[path[-1]] = draw.choice([junk for junk in JUNK if type(junk) is not type(old) or junk != old])
    return f"{how} {'.'.join(map(str, path))}: {old!r:.40}"


def sign(raw: dict[str, Any]) -> None:
    """Give a record the digest it would have if it were genuine."""
    raw["digest"] = digest_of({key: value for key, value in raw.items() if key not in ("digest", "provenance")})


def _poison(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    flat = tensor.view(-1)
    if tensor.is_floating_point() and flat.numel():
        flat[draw.randrange(flat.numel())] = draw.choice((float("nan"), float("inf"), float("-inf")))
        return tensor
    return torch.cat([flat, flat[:1]]) if flat.numel() else torch.ones(3, dtype=tensor.dtype)


def _signs(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    flat = tensor.view(-1)
    flat[draw.randrange(flat.numel())] = draw.choice((-1.0, -1e-30, 0.0)) if tensor.is_floating_point() else 17
    return tensor


def damage_tensors(draw: random.Random, parts: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """Damage one or two tensors; what was done, and whether no reader may take it even with a hash that agrees."""
    full = [name for name, tensor in parts.items() if tensor.numel()]
    name = draw.choice(full)
    tensor, how = parts[name], draw.choice(("poison", "sign", "swap", "drop", "add", "rename", "dtype", "shape"))
    fatal = True
    if how == "poison":
        parts[name] = _poison(draw, tensor)
    elif how == "sign":
        parts[name] = _signs(draw, tensor)
        least = float(parts[name].min())
        fatal = least < 0 and re.search(r"\.(variance|weight|fisher)$", name) is not None
        fatal = fatal or (least <= 0 and name.endswith(".scale"))
    elif how == "swap":
        other = draw.choice([n for n in full if n != name])
        parts[name], parts[other] = parts[other], tensor
        fatal = (parts[name].dtype, parts[name].shape) != (tensor.dtype, tensor.shape)
        name = f"{name} and {other}"
    elif how == "drop":
        parts.pop(name)
    elif how == "add":
        parts["../../" + name] = tensor.clone()
        fatal = False
    elif how == "rename":
        parts[draw.choice(("/", "../", "layers.99.")) + name] = parts.pop(name)
    elif how == "dtype":
        parts[name] = tensor.to(torch.int32 if tensor.dtype != torch.int32 else torch.int64)
    else:
        parts[name] = tensor.reshape(1, *tensor.shape)
    return f"{how} {name}", fatal


def record_of(path: Path) -> Path:
    """The JSON file of an artifact."""
    return path if path.is_file() else path / MANIFEST


def write_tensors(path: Path, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write the tensors of an artifact and what a manifest says of them."""
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, path / TENSORS)
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
               "sha256": tensor_digest(tensor)}
        for name, tensor in sorted(parts.items())
    }  # fmt: skip


def damage(draw: random.Random, kind: str, path: Path, elsewhere: Path) -> tuple[str, str]:
    """Damage an artifact; what was done, and what a reader may do with it.

    "same": refuse it, or read what was there before. "refuse". "any": the digest was made to agree and the values are
    possible, so that it is another artifact, not a damaged one; it may only not end in anything but an `AatcError`.
    """
    record, whole = record_of(path), draw.random()
    if whole < 0.4:
        file = record if kind == "evaluation" or draw.random() < 0.4 else path / TENSORS
        return damage_file(draw, file, elsewhere / file.name), "same"
    raw = json.loads(record.read_text(encoding="utf-8"))
    signed = draw.random() < 0.5
    if kind != "evaluation" and whole < 0.6:
        parts = load_file(path / TENSORS)
        what, fatal = damage_tensors(draw, parts)
        entries = write_tensors(path, parts)
        if signed:
            raw["tensors"] = entries
            sign(raw)
            record.write_text(json.dumps(raw), encoding="utf-8")
        return f"{what}{', signed' * signed}", "same" if not signed else "refuse" if fatal else "any"
    if draw.random() < 0.1:
        raw["schema_version"] = draw.choice((0, 3, 99, "2", 2.0, None, True, -1))
        what, may = f"schema version {raw['schema_version']!r}", "refuse"
    else:
        what = damage_record(draw, raw)
        may = "same" if not signed or what.split()[1].split(".")[0] == "provenance:" else "any"
    if signed:
        sign(raw)
    record.write_text(json.dumps(raw), encoding="utf-8")
    return f"{what}{', signed' * signed}", may


def fuzz(shelf: Shelf, kind: str, count: int, scratch: Path) -> Counter[str]:
    """Damage copies of one artifact ``count`` times and read them; how many ended how."""
    draw, ended = random.Random(f"{SEED} {kind}"), Counter[str]()
    original = shelf.read(kind, shelf.run)
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    for number in range(count):
        run = scratch / "run"
        shutil.copytree(shelf.run, run)
        what, may = damage(draw, kind, shelf.place(kind, run), elsewhere)
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


# the same damage met by commands


def commands(kind: str, run: Path, model: Path, corpus: Path) -> list[list[object]]:
    """Every command that reads an artifact of a kind."""
    evaluate = ["eval", "--run", run, "--model", model, "--text", corpus, "--length", 160, "--limit", 1, "--budget", 3]
    whole = [["inspect", "--run", run, "--json"], ["report", "--run", run, "--json"]]
    return whole + {
        "stats": [["whiten", "--run", run, "--force"], ["inspect", run / "stats", "--json"],
                  ["whiten", "--run", run, "--transform", "pca"], ["whiten", "--run", run, "--percentile", 98]],
        "transform": [["allocate", "--run", run, "--budget", 4], ["inspect", run / "transforms" / "whiten", "--json"],
                      ["allocate", "--check", run / "plans" / "paper-3"], evaluate, ["whiten", "--run", run]],
        "plan": [["inspect", "--plan", run / "plans" / "paper-3", "--json"], ["allocate", "--run", run, "--budget", 3],
                 ["allocate", "--check", run / "plans" / "paper-3", "--json"], evaluate],
        "evaluation": [["inspect", run / "evals" / "kl.paper-3.corpus.txt.160-80.json", "--json"], evaluate],
    }[kind]  # fmt: skip


def meet(shelf: Shelf, count: int, aatc: Any, model: Path, corpus: Path, scratch: Path) -> int:
    """Damage artifacts and run a command on each: one error, or a result; how many commands failed."""
    draw, failed = random.Random(SEED), 0
    (scratch / "elsewhere").mkdir()
    for number in range(count):
        run = scratch / "run"
        shutil.copytree(shelf.run, run)
        kind = draw.choice(KINDS[:-1])
        what, _ = damage(draw, kind, shelf.place(kind, run), scratch / "elsewhere")
        command = draw.choice(commands(kind, run, model, corpus))
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
