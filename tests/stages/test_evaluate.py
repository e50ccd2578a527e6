"""eval on a tiny model: what it writes, when it runs again, and what it refuses."""

from __future__ import annotations

import json

import pytest

from aatc_cli.evals.reading import read_evaluations

COMMON = ("--length", 256, "--limit", 2, "--first", 160)


@pytest.fixture
def heldout(tmp_path):
    path = tmp_path / "held out.txt"
    path.write_text("".join(f"line {index} of a text that nobody has calibrated on.\n" for index in range(40)))
    return path


def test_one_flat_file_per_method_and_text(aatc, run_folder, tiny_llama, heldout):
    outcome = aatc(
        "eval",
        "--run",
        run_folder,
        "--model",
        tiny_llama,
        "--recipe",
        "fp16",
        "--recipe",
        "paper",
        "--budget",
        3,
        "--text",
        heldout,
        "--text",
        "builtin:python-docs-test",
        *COMMON,
        "--json",
    )
    assert outcome.code == 0, outcome.err
    assert [(e["recipe"], e["text"]) for e in outcome.json] == [
        ("fp16", heldout.name),
        ("paper", heldout.name),
        ("fp16", "builtin:python-docs-test"),
        ("paper", "builtin:python-docs-test"),
    ]
    fp16, paper = outcome.json[:2]
    assert fp16["plan"] is None
    assert 0 <= fp16["kl_mean"] < 1e-6 < paper["kl_mean"]
    assert paper["windows"] == 2
    assert paper["tokens_scored"] == 2 * (256 - 1 - 160)
    assert paper["bits_at_context"] > paper["bits"] == pytest.approx(3.0, abs=0.01)
    assert {"kl_stderr", "kl_p99", "top1", "nll", "nll_reference", "seconds", "versions"} <= paper.keys()
    assert len(list((run_folder / "evals").glob("*.json"))) == 4


def test_what_is_there_is_not_run_again_and_what_changed_is(aatc, run_folder, tiny_llama, heldout):
    command = ("eval", "--run", run_folder, "--model", tiny_llama, "--budget", 3, "--text", heldout)
    first = aatc(*command, *COMMON, "--json").json
    again = aatc(*command, *COMMON, "--json")
    assert "nothing to do" in again.err
    assert again.json == first
    fewer = aatc(*command, "--length", 256, "--limit", 1, "--first", 160, "--json")
    assert "nothing to do" not in fewer.err
    assert fewer.json[0]["windows"] == 1
    heldout.write_text(heldout.read_text().replace("nobody", "no body"))
    assert "nothing to do" not in aatc(*command, "--length", 256, "--limit", 1, "--first", 160).err


def test_perplexity_scores_every_position_and_is_the_exponential(aatc, run_folder, tiny_llama, heldout):
    import math

    (found,) = aatc(
        "eval",
        "perplexity",
        "--run",
        run_folder,
        "--model",
        tiny_llama,
        "--budget",
        3,
        "--text",
        heldout,
        "--length",
        256,
        "--limit",
        3,
        "--json",
    ).json
    assert found["first_position"] == 0
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["perplexity_reference"] == pytest.approx(math.exp(found["nll_reference"]))
    assert found["perplexity_stderr"] == pytest.approx(found["perplexity"] * found["nll_stderr"])
    assert found["kl_mean"] is None


def test_distortion_prints_measured_over_predicted(aatc, run_folder, tiny_llama, heldout):
    command = (
        "eval",
        "distortion",
        "--run",
        run_folder,
        "--model",
        tiny_llama,
        "--budget",
        3,
        "--text",
        heldout,
        "--length",
        200,
        "--limit",
        1,
        "--first",
        150,
        "--queries",
        2,
    )
    outcome = aatc(*command)
    assert outcome.code == 0, outcome.err
    assert "measured / predicted" in outcome.out
    (stored,) = [e for e in read_evaluations(run_folder / "evals") if e.task == "distortion"]
    assert stored.queries == stored.tokens_scored == 2
    assert {(row.layer, row.side) for row in stored.distortion} == {
        (layer, side) for layer in range(4) for side in "kv"
    }


def test_plans_of_another_model_and_positions_that_are_not_there_are_refused(
    aatc, refuses, run_folder, tiny_qwen2, tiny_llama, heldout
):
    where = ("--run", run_folder, "--budget", 3, "--text", heldout)
    refuses("eval", *where, "--model", tiny_qwen2, *COMMON, says=("the model is not the one",), folder=run_folder)
    refuses("eval", *where, "--model", tiny_llama, "--length", 600, says=("600", "512"), folder=run_folder)
    refuses(
        "eval",
        *where,
        "--model",
        tiny_llama,
        "--length",
        64,
        "--first",
        63,
        says=("--first 63",),
        folder=run_folder,
        code=2,
    )
    refuses(
        "eval",
        "--run",
        run_folder,
        "--recipe",
        "paper",
        "--model",
        tiny_llama,
        says=("needs a budget",),
        folder=run_folder,
        code=2,
    )
    refuses(
        "eval",
        "distortion",
        "--run",
        run_folder,
        "--recipe",
        "fp16",
        "--model",
        tiny_llama,
        says=("no quantizer",),
        folder=run_folder,
        code=2,
    )


def test_a_flipped_byte_in_the_transform_is_refused(refuses, run_folder, tiny_llama, heldout):
    tensors = run_folder / "transforms" / "whiten" / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(content)
    refuses(
        "eval",
        "--run",
        run_folder,
        "--budget",
        3,
        "--model",
        tiny_llama,
        "--text",
        heldout,
        *COMMON,
        says=("is damaged", "does not match its recorded hash"),
        folder=run_folder,
    )


def test_a_stale_plan_is_refused(aatc, refuses, run_folder, tiny_llama, heldout):
    assert aatc("whiten", "--run", run_folder, "--head-groups", 2, "--force").code == 0
    refuses(
        "eval",
        "--run",
        run_folder,
        "--budget",
        3,
        "--model",
        tiny_llama,
        "--text",
        heldout,
        *COMMON,
        says=("was not made from the transform",),
        folder=run_folder,
    )


def test_json_is_one_document(aatc, run_folder, tiny_llama, heldout):
    outcome = aatc(
        "eval", "--run", run_folder, "--budget", 3, "--model", tiny_llama, "--text", heldout, *COMMON, "--json"
    )
    assert len(json.loads(outcome.out)) == 1


def test_kl_is_kept_token_by_token_where_that_is_asked(aatc, run_folder, tiny_llama, heldout):
    command = ("eval", "kl", "--run", run_folder, "--model", tiny_llama, "--budget", 3, "--text", heldout, *COMMON)
    [plain] = aatc(*command, "--json").json
    assert plain["traces"] is None
    # asked for later it is run again, and only the traces are new
    [traced] = aatc(*command, "--trace", 1, "--json").json
    assert {**traced, "traces": None, "seconds": 0.0} == {**plain, "seconds": 0.0}
    [trace] = traced["traces"]
    assert (trace["window"], trace["first"]) == (0, 161)
    assert len(trace["tokens"]) == len(trace["kl"]) == 256 - 1 - 160
    assert sum(trace["kl"]) / len(trace["kl"]) == pytest.approx(traced["kl_windows"][0])
    assert "".join(trace["tokens"])[4:-4] in heldout.read_text()
    # and what is there is there, with or without
    assert "nothing to do" in aatc(*command, "--trace", 1).err
    assert "nothing to do" in aatc(*command).err
    assert len(aatc(*command, "--trace", 9, "--json").json[0]["traces"]) == 2
