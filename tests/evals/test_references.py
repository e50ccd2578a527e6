"""references: what is counted of written answers, how prompts are cut, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.answers.forced import Forcer
from aatc_cli.evals.references.prompts import chosen_subtasks, make_job
from aatc_cli.models.loading import find_model, load_model, load_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Records in the shape of GSM8K, MATH-500 and LongBench."""

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(row) for row in rows))

    sums = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}. #### {2 * i}"} for i in range(40)]
    write("gsm8k/test.jsonl", sums[:4])
    write("gsm8k/train.jsonl", sums[4:])
    write("math500/test.jsonl", [{"problem": f"Half of {2 * i}?", "solution": f"It is {i}."} for i in range(80)])
    news = [{"context": f"news {i} " * 80, "input": "", "answers": [f"summary {i}", "another"]} for i in range(3)]
    write("longbench/multi_news.jsonl", [{"context": "short", "input": "", "answers": ["x"]}, *news])
    return tmp_path / "data"


def in_bytes(bos: int | None = None) -> Any:
    return SimpleNamespace(encode=lambda text: list(text.encode()), bos=bos)


def test_prompts_have_one_length_and_answers_stand_behind_them(data: Path) -> None:
    job = make_job("gsm8k", data, in_bytes(), 300, 8, 3)
    assert [len(sample.tokens) for sample in job.samples] == [300] * 3
    # the beginning is cut, the question is not; worked examples are none of those that are asked
    text = bytes(job.samples[1].tokens).decode()
    assert text.endswith("Question: What is 1 + 1?\nAnswer:")
    assert "What is 4 + 4?" not in text
    assert "What is 2 + 2?" not in text
    assert bytes(job.references[1].tokens) == b" It is 2"
    math = make_job("math-500", data, in_bytes(), 200, 99, 50)
    assert len(math.samples) == 50
    assert "Half of 122?" in bytes(make_job("math-500", data, in_bytes(), 400, 99, 1).samples[0].tokens).decode()
    # a document loses its middle, a short one is left out; what begins every text stays in front
    job = make_job("multi_news", data, in_bytes(bos=7), 201, 99, 9)
    assert len(job.samples) == 3
    assert job.samples[0].tokens[0] == 7
    whole = bytes(job.samples[0].tokens[1:]).decode()
    assert whole.startswith("You are given several news passages.")
    assert whole.endswith("Summary:")
    assert bytes(job.references[2].tokens) == b" summary 2"


def test_what_is_not_there_is_refused(data: Path) -> None:
    assert chosen_subtasks(["math*"]) == ["math-500"]
    with pytest.raises(UsageError, match="no references of"):
        chosen_subtasks(["mmlu"])
    with pytest.raises(AatcError, match="has no file"):
        make_job("qasper", data, in_bytes(), 100, 9, 1)
    with pytest.raises(AatcError, match="fills a prompt of 100000"):
        make_job("multi_news", data, in_bytes(), 100_000, 9, 1)
    with pytest.raises(AatcError, match="has no folder gsm8k"):
        make_job("gsm8k", data / "longbench", in_bytes(), 100, 9, 1)


def test_the_command(aatc: Callable[..., Any], tiny_llama: Path, run_folder: Path, data: Path) -> None:
    """The uncompressed model's figures from one plain pass; a plan's differ."""
    where = ("--run", run_folder, "--model", tiny_llama, "--dtype", "float32", "--data", data, "--batch", 2)
    asked = ("--length", 200, "--answer", 6, "--limit", 2)
    found = aatc("eval", "references", *where, *asked, "--recipe", "fp16", "--recipe", "paper", "--budget", 3, "--json")
    assert found.code == 0, found.err
    own, plan = found.json
    assert [row["subtask"] for row in own["rows"]] == ["gsm8k", "math-500", "multi_news"]
    assert "qasper" in own["left_out"]
    model = load_model(find_model(str(tiny_llama)))
    job = make_job("gsm8k", data, load_tokenizer(find_model(str(tiny_llama))), 200, 6, 2)
    for place, (sample, reference) in enumerate(zip(job.samples, job.references, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens + reference.tokens])).logits[0, 199:-1]
        right = torch.tensor(reference.tokens)
        each = logits.double().log_softmax(-1).gather(1, right[:, None])
        assert own["rows"][0]["logprobs"][place] == pytest.approx(float(each.mean()), rel=1e-5)
        assert own["rows"][0]["scores"][place] == pytest.approx(float((logits.argmax(-1) == right).double().mean()))
    assert plan["rows"][0]["logprob"] != pytest.approx(own["rows"][0]["logprob"], abs=1e-6)
    assert "nothing to do" in aatc("eval", "references", *where, *asked, "--recipe", "fp16").err


def test_what_was_cut_off_goes_on_where_it_was(
    aatc: Callable[..., Any], tiny_llama: Path, run_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one record: cut off in the second part of the second subtask, then taken up, as in one go."""
    monkeypatch.setattr("aatc_cli.evals.answers.parts._PART", 1)
    where = ("--run", run_folder, "--model", tiny_llama, "--dtype", "float32", "--data", data, "--batch", 1)
    asked = ("eval", "references", *where, "--length", 200, "--answer", 6, "--limit", 2, "--recipe", "fp16")
    subtasks = ("--subtask", "gsm8k", "--subtask", "math-500")
    whole = aatc(*asked, *subtasks, "--json").json
    told: list[str] = []
    answers = Forcer.each

    def cut(self: Forcer, job: Any, subjects: Any) -> Any:
        told.append(job.what)
        if len(told) == 4:
            raise AatcError("cut off", "go on")
        return answers(self, job, subjects)

    monkeypatch.setattr(Forcer, "each", cut)
    assert aatc(*asked, *subtasks, "--force").code == 1
    # the first part of every subtask before the second of any
    assert told == ["references of gsm8k", "references of math-500"] * 2
    [path] = (run_folder / "evals").glob("*references*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["samples"], row["asked"]) for row in rows] == [(2, None), (1, 2)]
    found = aatc(*asked, *subtasks, "--json")
    assert "gsm8k of fp16 is there already" in found.err
    assert len(told) == 5
    for row, one in zip(found.json[0]["rows"], whole[0]["rows"], strict=True):
        assert (row["logprobs"], row["scores"], row["asked"]) == (one["logprobs"], one["scores"], None)
