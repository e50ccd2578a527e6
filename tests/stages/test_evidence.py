"""make evidence: its own commands, made small, from calibration to report on a tiny model; and on again."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import read_study, study_path
from aatc_cli.studies import definition
from aatc_cli.studies.definition import Study, StudyTask, load_study

ROOT = Path(__file__).parents[2]
LENGTH, CONTEXT = 300, 1200
# what a call of the real thing is too large for here: Stats of as many windows have the names of the small numbers
SMALL = ("SIZES=2 3", "MOST=4", "KINDS=code", "DEVICE=cpu")
RECIPES = {"evidence": ("fp16", "loss-aware-tiles"), "domains": ("loss-aware-tiles",), "sizes": ("loss-aware",)}
STATS = {"windows-8": "windows-2", "windows-16": "windows-3"}
HAVE = (None, "mixed", "prose", "code", "windows", *STATS)
RECORDER = """#!/bin/sh
{ printf '%s\\t' "$AATC_RUN" "$@"; echo; } >> "$CALLS"
"""


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every aatc command of make evidence, the run first: make runs all of it with a recorder in aatc's place."""
    venv, model = folder / "venv", folder / "models" / "SmolLM2-135M-Instruct"
    (venv / "bin").mkdir(parents=True)
    model.mkdir(parents=True)
    (venv / "bin" / "aatc").write_text(RECORDER)
    (venv / "bin" / "aatc").chmod(0o755)
    (venv / ".installed").touch()
    (model / "config.json").touch()
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    where = (f"VENV={venv}", f"MODELS={folder / 'models'}", f"DATA={folder / 'data'}")
    subprocess.run(["make", "-C", str(ROOT), "evidence", *where, *SMALL], check=True, capture_output=True)
    return [line.split("\t")[:-1] for line in (folder / "calls").read_text().splitlines()]


def small(study: Study) -> Study:
    """The study with few methods at one budget, short windows and one sample of everything."""
    methods = tuple(
        method.model_copy(
            update={
                "stats": STATS.get(method.stats, method.stats),
                "budgets": () if method.recipe == "fp16" else (2.0,),
                "packed": (),
            }
        )
        for method in study.methods
        if method.recipe in RECIPES[study.name] and method.stats in HAVE
    )
    return study.model_copy(
        update={"methods": methods, "tasks": tuple(small_task(task, study.name) for task in study.tasks)}
    )


def small_task(task: StudyTask, study: str) -> StudyTask:
    subtasks = {"ruler": ("niah_single_1",), "references": ("gsm8k",)}.get(task.task, ())
    return task.model_copy(
        update={
            "only": (),
            # all of them are those of domains
            "texts": task.texts[:1] if study == "evidence" else task.texts,
            "limit": 1,
            "length": 900 if task.task == "recall" else LENGTH,
            "tokens": 20,
            # apart, as they are in the study
            "prompt": task.prompt and 140 + task.prompt // 30,
            "contexts": (CONTEXT,) if task.contexts else (),
            "subtasks": subtasks,
        }
    )


def write_data(folder: Path, corpus: Path) -> None:
    """Texts in the places where make evidence looks for them."""
    (folder / "gsm8k").mkdir(parents=True)
    text = corpus.read_text()
    (folder / "state_union.txt").write_text(text[: len(text) // 2])
    reasoning = [{"reasoning": text[start : start + 900]} for start in range(len(text) // 2, len(text) - 2000, 900)]
    (folder / "reasoning_cot.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reasoning))
    people = [f"{first} {last}" for first in ("Alma", "Bruno", "Clara") for last in ("Harrow", "Winter", "Quill")]
    said = [f"In {1800 + 7 * (i % 11)} the engineer {people[i * i % 9]} built bridge {i % 5}." for i in range(300)]
    (folder / "wiki.test.raw").write_text("\n".join(said))
    asked = [
        {"question": f"How much is {i} and {i}? " * 12, "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(30)
    ]
    for name in ("test", "train"):
        (folder / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))


def small_call(call: Sequence[str], model: Path) -> list[str]:
    """A command with the tiny model in place of the real one, and with few and short windows."""
    few = {"--length": LENGTH, "--rows": 64, "--batch": 2}
    found, rest = [], list(call)
    while rest:
        word = rest.pop(0)
        if word == "--profile":
            rest.pop(0)
        elif word in few:
            rest.pop(0)
            found += [word, str(few[word])]
        elif word in ("--samples", "--fisher"):
            found += [word, str(min(int(rest.pop(0)), 5))]
        else:
            found.append(word)
    return [*found, "--model", str(model)] if call[0] != "report" else found


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_evidence_from_calibration_to_report(
    new_model: Any, corpus: Path, tmp_path: Path, aatc: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(tmp_path / "tiny", max_position_embeddings=6000, num_hidden_layers=2)
    write_data(tmp_path / "data", corpus)
    calls = commands(tmp_path, monkeypatch)
    assert {call[0] for call in calls} == {"runs/evidence"}
    assert [call[1] for call in calls] == ["collect"] * 5 + ["study"] * 9 + ["report"]
    monkeypatch.setattr(definition, "load_study", lambda name: small(load_study(name)))
    run = Run(tmp_path / "run")
    monkeypatch.setenv("AATC_RUN", str(run.root))

    def go(calls: Sequence[Sequence[str]]) -> None:
        for call in calls:
            outcome = aatc(*small_call(call[1:], model))
            assert outcome.code == 0, (call, outcome.err)

    go(calls[:-1])
    results = {name: read_study(study_path(run.root, name)) for name in RECIPES}
    assert not any(result.missing for result in results.values())
    asked = {cell.task_name.split(" ")[0] for cell in results["evidence"].cells}
    assert asked == {"kl", "ruler", "needles", "turns", "references", "recall", "accumulate"}
    assert {row.stats for row in results["sizes"].rows} == {"windows-2", "windows-3", "windows"}
    assert {row.stats for row in results["domains"].rows} == {"mixed", "prose", "code"}
    # what is there is left alone; what went missing is made again
    files = [path for path in run.root.rglob("*.json") if "evals" in path.parts]
    times = {path: path.stat().st_mtime_ns for path in files}
    lost = next(path for path in files if path.name.startswith("recall.loss-aware"))
    lost.unlink()
    go(calls)
    assert {path for path in files if path.stat().st_mtime_ns != times[path]} == {lost}
    assert (run.root / "report" / "report.md").is_file()
