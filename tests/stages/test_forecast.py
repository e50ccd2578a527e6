"""--dry-run: bytes as they will be, time within reason, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def size(folder: Path) -> int:
    return (folder / "tensors.safetensors").stat().st_size


@pytest.mark.parametrize("fisher", [0, 2])
def test_collect(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path, fisher: int) -> None:
    run = tmp_path / "run"
    settings = ("--samples", 6, "--length", 160, "--rows", 100, "--fisher", fisher)
    command = ("collect", "--run", run, "--model", tiny_llama, "--text", corpus, *settings)
    told = aatc(*command, "--dry-run", "--json")
    assert (told.code, told.err) == (0, "")
    assert not run.exists()
    [write] = told.json["writes"]
    assert (write["path"], write["state"]) == (str(run / "stats"), "new")
    assert 0 < told.json["seconds"] < 60
    assert 0 < told.json["bytes_memory"] < told.json["bytes_free"]
    assert aatc(*command).code == 0
    # a header of names and shapes comes on top
    assert 0 <= size(run / "stats") - write["bytes"] < 20_000
    again = aatc(*command, "--dry-run", "--json").json["writes"]
    assert again[0]["state"].startswith("there already")


def test_whiten(aatc: Any, run_folder: Path, snapshot: Any) -> None:
    before = snapshot(run_folder)
    told = aatc("whiten", "--run", run_folder, "--dry-run", "--json").json
    assert snapshot(run_folder) == before
    assert [each["path"] for each in told["reads"]] == [str(run_folder / "stats")]
    written = told["writes"][0]["bytes"]
    assert 0 <= size(run_folder / "transforms" / "whiten") - written < 20_000
    assert 0 < told["seconds"] < 60
    wrong = aatc("whiten", "--run", run_folder, "--head-groups", 3, "--dry-run")
    assert (wrong.code, wrong.out) == (2, "")


def test_allocate(aatc: Any, run_folder: Path, snapshot: Any) -> None:
    before = snapshot(run_folder)
    budgets = ("--budget", 3, "--budget", 4, "--budget", 0.05)
    told = aatc("allocate", "--run", run_folder, *budgets, "--dry-run", "--json")
    assert (told.code, snapshot(run_folder)) == (0, before)
    assert [Path(each["path"]).name for each in told.json["writes"]] == ["paper-3", "paper-4"]
    assert [each["state"] == "new" for each in told.json["writes"]] == [False, True]
    assert aatc("allocate", "--run", run_folder, "--budget", 4).code == 0
    plan = aatc("inspect", "--run", run_folder, "--budget", 4, "--json").json
    notes = " ".join(told.json["notes"])
    assert f"paper 4: cache of {plan['layout']['bytes_total']:,} bytes at 8,192 tokens" in notes
    assert "paper 0.05 cannot be met: " in notes
    assert 0 <= size(run_folder / "plans" / "paper-4") - told.json["writes"][1]["bytes"] < 5_000
    assert aatc("allocate", "--check", run_folder / "plans" / "paper-4", "--budget", 3, "--dry-run").code == 2


def test_eval(aatc: Any, run_folder: Path, tiny_llama: Path, corpus: Path, snapshot: Any) -> None:
    assert aatc("allocate", "--run", run_folder, "--budget", 4, "-q").code == 0
    before = snapshot(run_folder)
    command = ("--run", run_folder, "--model", tiny_llama, "--text", corpus, "--length", 160, "--limit", 3)
    told = aatc("eval", "kl", *command, "--dry-run", "--json").json
    assert snapshot(run_folder) == before
    # the model, and all plans of the run
    assert [Path(each["path"]).name for each in told["reads"]] == ["tiny-llama", "paper-3", "paper-4"]
    assert told["notes"] == ["3 windows of 160 tokens, 3 passes each"]
    assert 0 < told["seconds"] < 60
    assert 0 < told["bytes_memory"] < told["bytes_free"]


def test_tables(aatc: Any, run_folder: Path) -> None:
    out = aatc("allocate", "--run", run_folder, "--budget", 4, "--dry-run").out
    assert out.startswith("allocate, dry run: nothing was written")
    assert max(map(len, out.splitlines())) <= 80
