"""aatc eval speed on a tiny model: what it writes and prints, and that wrong numbers have no speed."""

from __future__ import annotations

import pytest

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.plan import Plan
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.runtime.packed.site import SiteCodec

TASK = ("eval", "speed", "--budget", 3, "--repeats", 2)


@pytest.fixture
def command(run_folder, tiny_llama):
    return (*TASK, "--run", run_folder, "--model", tiny_llama)


def test_every_part_and_size_beside_the_model_s_own_cache(aatc, command, run_folder):
    sizes = ("--context", 20, "--context", 300, "--batch", 1, "--batch", 2)
    outcome = aatc(*command, *sizes, "--json")
    assert outcome.code == 0, outcome.err
    (result,) = outcome.json
    assert [(r["context"], r["batch"], r["part"], r["backend"]) for r in result["rows"]] == [
        (context, batch, part, backend)
        for context in (20, 300)
        for batch in (1, 2)
        for part in ("prefill", "decode")
        for backend in ("uncompressed", "torch")
    ]
    layout = Plan.open(run_folder / "plans" / "paper-3").layout
    for row in result["rows"]:
        assert 0 < row["milliseconds_low"] <= row["milliseconds"] <= row["milliseconds_high"]
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        if row["backend"] == "uncompressed":
            assert row["ratio_low"] == row["ratio_high"] == 1
        moved = row["bytes_moved"]
        if row["part"] == "prefill":
            assert moved is None
        elif row["backend"] == "uncompressed":
            assert moved == 2 * layout.reference_bytes(row["context"], row["batch"])
        else:
            parts = layout.breakdown(row["context"], row["batch"])
            assert moved == sum(parts.values()) + parts["sinks"] + parts["window"]
    assert len(result["checks"]) == 4
    assert all(check["error"] <= check["bound"] for check in result["checks"])
    assert (result["repeats"], result["steps"], result["absolute"]) == (2, 16, False)
    [stored] = (run_folder / "evals").glob("speed.paper-3.*.json")
    kept = {key: value for key, value in result.items() if key != "path"}
    assert read_measurement(stored, SpeedResult).model_dump(mode="json") == kept
    assert read_evaluations(run_folder / "evals") == []


def test_on_a_cpu_only_ratios_are_printed(aatc, command):
    outcome = aatc(*command, "--context", 30)
    assert outcome.code == 0, outcome.err
    assert "only ratios mean anything on a CPU" in " ".join(outcome.out.split())
    assert "milliseconds" not in outcome.out
    assert "uncompressed" not in outcome.out


def test_no_time_is_reported_of_a_wrong_cache(refuses, command, run_folder, monkeypatch):
    original = SiteCodec.value_sums
    monkeypatch.setattr(SiteCodec, "value_sums", lambda self, *a: [-3 * part for part in original(self, *a)])
    refuses(*command, "--context", 300, says=("first decoded logits", "no time is reported"), folder=run_folder)


def test_what_cannot_be_timed_is_refused(refuses, run_folder, tiny_llama, tiny_qwen2):
    task = ("eval", "speed", "--run", run_folder)
    refuses(*task, "--model", tiny_llama, "--recipe", "fp16", says=("fp16",), folder=run_folder, code=2)
    refuses(*task, "--model", tiny_qwen2, "--budget", 3, says=("the model is not the one",), folder=run_folder)
    refuses(*task, "--model", tiny_llama, "--budget", 3, "--context", 500, says=("597", "512"), folder=run_folder)
