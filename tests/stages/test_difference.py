"""aatc inspect A B."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(aatc: Any, run_folder: Path) -> Path:
    assert aatc("allocate", "--run", run_folder, "--budget", 4, "-q").code == 0
    return run_folder


def test_two_plans(aatc: Any, run: Path) -> None:
    plans = [run / "plans" / f"paper-{bits}" for bits in (3, 4)]
    found = aatc("inspect", *plans, "--json").json
    assert (found["kind"], found["identical"]) == ("plan", False)
    fields = {each["field"]: (each["first"], each["second"]) for each in found["fields"]}
    assert fields["settings.budget.value"] == (3.0, 4.0)
    assert not any(name.startswith(("model", "texts", "inputs")) for name in fields)
    seen = [aatc("inspect", "--plan", plan, "--json").json for plan in plans]
    assert found["digests"] == [each["digest"] for each in seen]
    for site, one, two in zip(found["sites"], *(each["sites"] for each in seen), strict=True):
        assert site["bits_mean"] == pytest.approx([one["bits_mean"], two["bits_mean"]])
    table = aatc("inspect", *plans).out
    assert "settings.budget.value" in table
    assert "channels that differ" in " ".join(table.split())
    assert max(map(len, table.splitlines()[1:])) <= 80


def test_a_copy_is_identical(aatc: Any, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run / "transforms" / "whiten", tmp_path / "copy")
    found = aatc("inspect", run / "transforms" / "whiten", copy, "--json").json
    assert (found["kind"], found["identical"], found["fields"], found["tensors"]) == ("transform", True, [], [])


def test_two_stats(aatc: Any, run: Path, tiny_llama: Path, corpus: Path) -> None:
    more = ("--samples", 9, "--length", 64, "--rows", 256, "--name", "more", "-q")
    assert aatc("collect", "--run", run, "--model", tiny_llama, "--text", corpus, *more).code == 0
    found = aatc("inspect", run / "stats", run / "more", "--json").json
    assert {"settings.samples", "results.tokens"} <= {each["field"] for each in found["fields"]}
    assert "layers.0.k_outer" in found["tensors"]


@pytest.mark.parametrize("pair", [("stats", "plans/paper-3"), ("stats", "nothing"), ("stats", "transforms")])
def test_what_cannot_be_compared(aatc: Any, run: Path, pair: tuple[str, str]) -> None:
    refused = aatc("inspect", *(run / place for place in pair))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("Error: ")


def test_evaluations(aatc: Any, run: Path, evaluated: Any) -> None:
    files = [evaluated(run, f"paper-{bits}", one=kl)[0] for bits, kl in ((3, 0.5), (4, 0.25))]
    found = aatc("inspect", *files, "--json").json
    fields = {each["field"]: (each["first"], each["second"]) for each in found["fields"]}
    assert fields["kl_mean"] == (0.5, 0.25)
