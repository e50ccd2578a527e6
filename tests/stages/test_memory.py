"""aatc eval memory on tiny models, on a geometry alone, and on the real small model: live bytes are the law's."""

from __future__ import annotations

import pytest

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.plan import Plan
from aatc_cli.core.layout import fp16_bytes
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.profiles import load_model_profile

PROFILE = """
name = "small"
model = "someone/small"
context = 4096
head_groups = 2

[geometry]
layers = 3
heads = 4
kv_heads = 2
head_dim = 24
hidden_size = 96
{sliding}
[calibration.rates]
sources = ["builtin:python-docs"]
samples = 4
length = 64
"""


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2), ("bfloat16", 1)])
def test_live_bytes_are_predicted_to_the_byte(aatc, run_folder, tiny_llama, dtype, share):
    outcome = aatc(
        "eval",
        "memory",
        "--run",
        run_folder,
        "--model",
        tiny_llama,
        "--budget",
        3,
        "--context",
        1,
        "--context",
        333,
        "--batch",
        3,
        "--dtype",
        dtype,
        "--json",
    )
    assert outcome.code == 0, outcome.err
    (result,) = outcome.json
    layout = Plan.open(run_folder / "plans" / "paper-3").layout
    assert result["synthetic"] is False
    assert [(row["context"], row["batch"]) for row in result["rows"]] == [(1, 3), (333, 3)]
    for row in result["rows"]:
        parts = layout.breakdown(row["context"], row["batch"])
        law = sum(count * (share if cause in ("sinks", "window") else 1) for cause, count in parts.items())
        assert row["bytes_live"] == row["bytes_predicted"] == law
        assert row["bytes_fp16"] == row["batch"] * row["context"] * 2 * 4 * 32 * 2
        assert row["ratio"] == row["bytes_fp16"] / row["bytes_live"]
        assert row["peak_bytes"] is None or row["peak_bytes"] >= row["base_bytes"] > 1e6
    [file] = (run_folder / "evals").glob("memory.paper-3.*.json")
    kept = {key: value for key, value in result.items() if key != "path"}
    assert read_measurement(file, MemoryResult).model_dump(mode="json") == kept
    assert read_evaluations(run_folder / "evals") == []


def test_the_table_is_in_megabytes(aatc, run_folder, tiny_llama):
    command = ("eval", "memory", "--run", run_folder, "--model", tiny_llama, "--budget", 3)
    outcome = aatc(*command, "--context", 200)
    assert outcome.code == 0, outcome.err
    assert "memory in MB of" in outcome.out
    assert "synthetic" not in outcome.out


@pytest.mark.parametrize(
    "sliding", ["", "sliding_layers = 2\nsliding_window = 64\nfull_layers = [1, 2, 4]\n"], ids=["full", "sliding"]
)
def test_a_geometry_alone_is_filled_with_random_vectors(aatc, tmp_path, sliding):
    profile = tmp_path / "small.toml"
    profile.write_text(PROFILE.format(sliding=sliding))
    command = (
        "eval",
        "memory",
        "--run",
        tmp_path / "run",
        "--profile",
        profile,
        "--budget",
        2.5,
        "--budget",
        1,
        "--context",
        50,
        "--context",
        1000,
        "--batch",
        2,
        "--json",
    )
    outcome = aatc(*command)
    assert outcome.code == 0, outcome.err
    geometry = load_model_profile(str(profile)).geometry
    for result, bits in zip(outcome.json, (2.5, 1.0), strict=True):
        assert result["synthetic"] is True
        assert result["bits"] == bits
        assert result["plan"] is None
        for row in result["rows"]:
            assert row["bytes_live"] == row["bytes_predicted"]
            assert row["bytes_fp16"] == fp16_bytes(geometry, row["context"], 2)
        # codes of the mean width, two token scales of two groups, 132 exact rows, and a little padding
        packed = 1000 - 4 - 128 + 12
        exact = 2 * 3 * (132 * 48 * 2 + packed * (2 * 2 + 48 * bits / 8)) + (2 * 2 * 64 * 48 * 2 if sliding else 0)
        assert 1 <= result["rows"][1]["bytes_live"] / (2 * exact) < 1.06
    assert len(list((tmp_path / "run" / "evals").glob("memory.paper-2.5.someone-small.*.json"))) == 1
    table = aatc(*command[:6], "--budget", 2.5, "--context", 5)
    assert "synthetic: random vectors and widths, no model" in " ".join(table.out.split())


@pytest.mark.slow
def test_the_headline_of_the_paper(aatc, tmp_path):
    (result,) = aatc(
        "eval",
        "memory",
        "--run",
        tmp_path,
        "--profile",
        "llama-3.1-8b-instruct",
        "--budget",
        2.5,
        "--context",
        8192,
        "--json",
    ).json
    (row,) = result["rows"]
    # 184 MB of 1.07 GB; random widths cost a little more padding than the paper's
    assert row["bytes_live"] == row["bytes_predicted"]
    assert row["bytes_live"] == pytest.approx(184e6, rel=0.01)
    assert row["bytes_fp16"] == pytest.approx(1.07e9, rel=0.01)


def test_what_cannot_be_measured_is_refused(refuses, run_folder, tiny_llama, tiny_qwen2):
    task = ("eval", "memory", "--run", run_folder)
    refuses(*task, "--model", tiny_llama, "--recipe", "fp16", says=("fp16",), folder=run_folder, code=2)
    refuses(*task, "--model", tiny_qwen2, "--budget", 3, says=("the model is not the one",), folder=run_folder)
    refuses(*task, "--model", tiny_llama, "--budget", 3, "--context", 600, says=("600", "512"), folder=run_folder)
    profile = (*task, "--profile", "smollm2-135m-instruct")
    refuses(*profile, says=("needs a budget",), folder=run_folder, code=2)
    refuses(*profile, "--recipe", "fp16", "--budget", 2, says=("fp16",), folder=run_folder, code=2)
