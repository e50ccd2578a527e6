"""inspect of results that are not on windows of text: the tables that eval printed when it wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.errors import ArtifactError
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.answers.table import benchmark_tables
from aatc_cli.evals.reading import read_result
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.result import StabilityRow
from aatc_cli.stages.inspect import inspect_path

OF = {
    "recipe": "paper",
    "budget": "2",
    "model": "m",
    "plan": "a" * 64,
    "bits": 2.0,
    "seconds": 1.5,
    "device": "cpu",
    "dtype": "float32",
    "versions": {},
}


@pytest.mark.parametrize("task", ["memory", "speed"])
def test_inspect_prints_what_eval_did(aatc: Any, run_folder: Path, tiny_llama: Path, task: str) -> None:
    size = ("--context", 200, "--batch", 2, *(("--repeats", 2) if task == "speed" else ()))
    done = aatc("eval", task, "--run", run_folder, "--model", tiny_llama, "--budget", 3, *size)
    assert done.code == 0, done.err
    [file] = (run_folder / "evals").glob(f"{task}.paper-3.*.json")
    shown = aatc("inspect", file)
    assert shown.code == 0, shown.err
    assert "paper-3" in done.out
    assert shown.out.startswith(done.out)
    # below it what the file says of itself
    fields = shown.out.removeprefix(done.out)
    assert f"evaluation {file.name}" in fields
    assert "rows" not in fields
    stored = json.loads(file.read_text("utf-8"))
    assert aatc("inspect", file, "--json").json == {key: stored[key] for key in stored if key != "digest"}


def row(subtask: str, score: float, stderr: float | None, ends: tuple[float, float] | None = None) -> BenchmarkRow:
    return BenchmarkRow(
        subtask=subtask,
        context=1024,
        metric="exact",
        score=score,
        stderr=stderr,
        low=ends[0] if ends else None,
        high=ends[1] if ends else None,
        samples=20,
        prompts_sha256="p",
        seconds=1.0,
    )


def test_a_benchmark(tmp_path: Path) -> None:
    result = BenchmarkResult(
        benchmark="ruler", rows=[row("niah", 0.85, 0.08, (0.64, 0.948)), row("vt", 0.25, None)], **OF
    )
    inspection = inspect_path(write_evaluation(tmp_path, result), 8192)
    assert inspection.data == result.model_dump(mode="json")
    measured, fields = inspection.tables
    assert measured.columns == ["subtask", "context", "samples", "paper-2"]
    assert measured.rows == [
        ["niah", "1024", "20", "85.0 (64.0 to 94.8)"],
        ["vt", "1024", "20", "25.0"],
        ["mean", "1024", "", "55.0"],
    ]
    assert ["benchmark", "ruler"] in fields.rows
    plain = {"recipe": "fp16", "budget": None, "plan": None, "rows": [row("vt", 0.9, 0.1)]}
    reference = result.model_copy(update=plain)
    [beside] = benchmark_tables([reference, result.model_copy(update={"rows": [row("vt", 0.5, 0.1)]})])
    assert beside.rows == [["vt", "1024", "20", "90.0", "50.0 *"]]


def test_stability(tmp_path: Path) -> None:
    rows = [
        StabilityRow(
            stats=name,
            stats_digest="d",
            calibration=["c"],
            text="t",
            text_sha256="s",
            bits=2.0,
            kl_mean=kl,
            kl_stderr=0.01,
            predicted=0.1,
            predicted_elsewhere=None,
        )
        for name, kl in (("one", 0.1), ("two", 0.2))
    ]
    result = StabilityResult(length=64, first_position=32, windows=[1], rows=rows, kl_spread={"t": 2.0}, **OF)
    [measured, _] = inspect_path(write_evaluation(tmp_path, result), 8192).tables
    assert measured.rows == [
        ["paper-2", "one", "t", "2", "0.1 ± 0.01", "0.1", "", "2"],
        ["paper-2", "two", "t", "2", "0.2 ± 0.01", "0.1", "", "2"],
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema_version": 1, "task": "memory"}', "is not a valid evaluation"),
        ('{"schema_version": 1, "task": "other"}', "is not a valid evaluation"),
        ('{"schema_version": 1, "task": ["memory"]}', "is not a valid evaluation"),
        ('{"task": "memory"}', "has schema version None"),
        ("[1]", "is not a valid evaluation"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_what_is_no_result(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "memory.paper-2.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ArtifactError, match=says):
        read_result(path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_result(tmp_path)
