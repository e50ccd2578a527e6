"""Every option of every command with wrong values, and every stage on every wrong artifact: a matrix, not samples."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from typer.models import ArgumentInfo, OptionInfo

from aatc_cli.artifacts.manifest import MANIFEST
from aatc_cli.cli import app
from aatc_cli.cli.app import Ordered
from aatc_cli.cli.evaluate import parameters_of
from aatc_cli.evals import TASKS

# what a value must be wrong beside: other options without which this one is not looked at
BESIDE: dict[tuple[str, str], tuple[object, ...]] = {
    ("collect", "calibration"): ("--profile", "smollm2-135m-instruct"),
    # with nothing to do there is nothing that a device is needed for
    ("whiten", "device"): ("--force",),
    ("allocate", "ratio"): ("--context", 64),
    ("allocate", "bytes"): ("--context", 64),
}
# options of a task that are in the matrix under the name of another already: those of all are tried once
TRIED_ONCE = "kl"
# texts that may be anything
FREE = {("report", "title"), ("doctor", "run")}
# text that is wrong for every option that takes text or a path: no such model, recipe, profile, text, device, folder
NOWHERE = ("no/such/thing/at-all", "", "\n", "-")


@dataclass(frozen=True)
class Option:
    """One option or argument of one command, as its function declares it."""

    command: str
    name: str
    flag: str | None
    kind: Any
    choices: tuple[str | int, ...]
    low: float | None
    high: float | None
    several: bool = False

    def wrong(self) -> Iterator[tuple[object, ...]]:
        """Arguments that must not be taken."""
        if self.flag is None:
            yield from ((value,) for value in NOWHERE)
            return
        if self.kind is bool:
            yield from ((f"{self.flag}=true",), (f"{self.flag}=no",))
            return
        yield (self.flag,)
        for value in self.values():
            yield (self.flag, value)

    def values(self) -> list[object]:
        """Values that are wrong for the option's type, or for what it stands for."""
        if self.choices:
            first = str(self.choices[0])
            written = [first.upper(), f"{first} "] if isinstance(self.choices[0], str) else [f"{first}.5"]
            return ["nonsense", "", *written, ",".join(map(str, self.choices))]
        if self.kind in (int, float):
            # several numbers may be separated by commas
            found: list[object] = ["x", "", "1,x" if self.several else "1,5", "0x10", "--"]
            found += ["1.5", "nan", "inf"] if self.kind is int else []
            found += [self.low - 1] if self.low is not None else []
            return found + ([self.high + 1] if self.high is not None else [])
        return list(NOWHERE)


def options() -> list[Option]:
    """Every option of every command, read from what is behind them, so that a new one is in the matrix too."""
    found = []
    for command in app.registered_commands:
        assert command.callback is not None
        label = command.name or command.callback.__name__
        hints = get_type_hints(command.callback, include_extras=True)
        found += [option for name, hint in hints.items() if (option := option_of(label, name, hint))]
    for made in Ordered.made:
        parameters = made.parameters()
        found += [option for one in parameters if (option := option_of(str(made.name), one.name, one.annotation))]
    tried: set[str] = set()
    for task in sorted(TASKS, key=lambda task: task.name != TRIED_ONCE):
        parameters = [one for one in parameters_of(task) if one.name not in tried]
        tried |= {one.name for one in parameters}
        label = f"eval {task.name}"
        found += [option for one in parameters if (option := option_of(label, one.name, one.annotation))]
    return found


def option_of(label: str, name: str, hint: Any) -> Option | None:
    """The option of a command that a parameter is; None for what is no option."""
    if get_origin(hint) is not Annotated:
        return None
    kind, info = get_args(hint)[:2]
    assert isinstance(info, OptionInfo | ArgumentInfo)
    several = any(get_origin(part) is list for part in (kind, *get_args(kind)))
    while type(None) in get_args(kind) or get_origin(kind) is list:
        kind = next(part for part in get_args(kind) if part is not type(None))
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    flag = next(iter(info.param_decls or (info.default,))) if isinstance(info, OptionInfo) else None
    return Option(label, name, flag, kind, choices, info.min, info.max, several)


OPTIONS = options()


@pytest.fixture
def usual(run_folder: Path, tiny_llama: Path, corpus: Path) -> Callable[[str], list[object]]:
    """Arguments with which a command gets as far as looking at all the others."""

    def arguments(command: str) -> list[object]:
        model = ["--model", tiny_llama, "--text", corpus]
        plan = ["--recipe", "paper", "--budget", 3]
        own = {
            "collect": [*model, "--samples", 6, "--length", 48, "--name", "new"],
            "allocate": ["--budget", 4],
            "eval kl": [*model, "--length", 160, "--limit", 1, *plan],
            "eval stability": ["--model", tiny_llama, "--budget", 3],
            "eval offline-speed": ["--profile", "smollm2-135m-instruct"],
            "study": ["no/such/study", "--model", tiny_llama],
            "pick": ["--kl", 0.5],
        }
        elsewhere = {
            "list": ["list", "recipes"],
            "export": ["export", run_folder / "plans" / "paper-3", run_folder.parent / "shipped", "--force"],
        }
        other = ["--model", tiny_llama, *plan] if command.startswith("eval ") else []
        return elsewhere.get(command) or [*command.split(), "--run", run_folder, *own.get(command, other)]

    return arguments


def test_the_matrix_covers_every_command() -> None:
    assert {option.command for option in OPTIONS} >= {"collect", "whiten", "allocate", "inspect", "eval kl", "report"}
    assert len(OPTIONS) > 70
    assert sum(len(list(option.wrong())) for option in OPTIONS) > 300


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.command}-{option.name}")
def test_wrong_values(aatc: Any, usual: Any, option: Option, run_folder: Path, snapshot: Any) -> None:
    before = snapshot(run_folder)
    for wrong in option.wrong():
        beside = BESIDE.get((option.command, option.name), ())
        if (option.command, option.name) in FREE and len(wrong) == 2:
            continue
        writes = option.command.split()[0] in ("collect", "eval", "study")
        if option.name in ("run", "name") and writes and wrong[-1] not in ("", "\n"):
            continue
        outcome = aatc(*usual(option.command), *beside, *wrong)
        lines = [line.partition(": ") for line in outcome.err.splitlines() if line.startswith(("Error: ", "Hint: "))]
        assert [line[0] for line in lines] == ["Error", "Hint"], f"{wrong}: {outcome}"
        assert lines[1][2], wrong
        assert "Traceback" not in outcome.err, wrong
        assert outcome.out == "", wrong
        # what no type allows is a wrong command line; what is not there is a failure
        typed = option.kind in (int, float, bool) or bool(option.choices) or len(wrong) == 1
        assert outcome.code == (2 if typed and option.flag else outcome.code), f"{wrong}: {outcome}"
        assert outcome.code in (1, 2), wrong
        assert snapshot(run_folder) == before, wrong


# every stage on every wrong artifact


def _text(place: Path, whole: Path) -> None:
    place.write_text("text\n", encoding="utf-8")


def _bare(place: Path, whole: Path) -> None:
    place.mkdir()
    (place / MANIFEST).write_text("{}", encoding="utf-8")


def _copy(what: str) -> Callable[[Path, Path], object]:
    def put(place: Path, whole: Path) -> None:
        source = whole / what
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)

    return put


WRONG: dict[str, Callable[[Path, Path], object]] = {
    "stats": _copy("stats"),
    "transform": _copy("transforms/whiten"),
    "plan": _copy("plans/paper-3"),
    "another-transform": _copy("transforms/identity"),
    "run": _copy(""),
    "file": _text,
    "empty": lambda place, whole: place.mkdir(),
    "bare": _bare,
    "pipe": lambda place, whole: os.mkfifo(place),
    "circle": lambda place, whole: place.symlink_to(place.name),
    "out": lambda place, whole: place.symlink_to(whole / "plans" / "paper-3"),
    "nothing": lambda place, whole: None,
}
# where each stage looks, and what it takes there
PLACES = {
    "stats": ("stats", ("whiten",)),
    "transforms/whiten": ("transform", ("allocate", "eval", "check")),
    "plans/paper-3": ("plan", ("inspect", "eval", "check", "report")),
    "evals/kl.x.json": ("evaluation", ("report",)),
}
CELLS = [
    (place, stage, wrong)
    for place, (kind, stages) in PLACES.items()
    for stage in stages
    for wrong in WRONG
    if wrong != kind
    and (place, wrong) != ("evals/kl.x.json", "nothing")
    # a plan named by its path may lie anywhere, and in a run that holds no other
    and (place, stage, wrong) not in (("plans/paper-3", "check", "out"), ("plans/paper-3", "check", "run"))
]


@pytest.mark.parametrize(("place", "stage", "wrong"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_wrong_artifacts(
    aatc: Any,
    run_folder: Path,
    base_run: Path,
    tiny_llama: Path,
    corpus: Path,
    snapshot: Any,
    place: str,
    stage: str,
    wrong: str,
) -> None:
    target = run_folder / place
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    WRONG[wrong](target, base_run)
    where = ["--run", run_folder]
    command = {
        "whiten": ["whiten", *where, "--percentile", 98, "--force"],
        "allocate": ["allocate", *where, "--budget", 4],
        "inspect": ["inspect", *where, "--budget", 3],
        "report": ["report", *where],
        "check": ["allocate", "--check", run_folder / "plans" / "paper-3"],
        "eval": ["eval", *where, "--model", tiny_llama, "--text", corpus, "--length", 160, "--budget", 3],
    }[stage]
    before = snapshot(run_folder) if wrong not in ("pipe", "circle") else None
    outcome = aatc(*command)
    if stage == "report" and wrong in ("nothing", "empty") and place.startswith("plans"):
        # no plan is not a wrong one, but nothing to report
        assert "nothing to report" in outcome.err or "damaged" in outcome.err or "is not an artifact" in outcome.err
    lines = [line.partition(": ") for line in outcome.err.splitlines() if line.startswith(("Error: ", "Hint: "))]
    assert (outcome.out, [line[0] for line in lines]) == ("", ["Error", "Hint"]), outcome
    assert outcome.code == (2 if "needs a whiten transform" in outcome.err else 1)
    assert before is None or snapshot(run_folder) == before
