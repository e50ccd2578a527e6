"""Benchmarks by lm-eval: prompts, records and scores; whole runs on real files are slow tests."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.lm_eval import asking as harness
from aatc_cli.evals.lm_eval import longbench
from aatc_cli.evals.lm_eval.records import Source, chosen_subtasks, qmsum_rows

READY = all(importlib.util.find_spec(name) for name in harness._NEEDED)
needs_harness = pytest.mark.skipif(
    not READY, reason="lm-eval and its scorers are not installed: pip install 'aatc[bench]'"
)


def data_folder(name):
    folder = os.environ.get("AATC_DATA")
    if folder is None or not (Path(folder) / name).is_dir():
        pytest.skip(f"the original files of {name} are not here: AATC_DATA names the folder that holds {name}/")
    return Path(folder) / name


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_templates_and_lengths_are_longbenchs_own():
    folder = data_folder("longbench")
    templates = json.loads((folder / "dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads((folder / "dataset2maxlen.json").read_text(encoding="utf-8"))
    for name, template in longbench.TEMPLATES.items():
        assert template == templates[name]
        # the paper's section "Benchmarks" states the same lengths
        assert longbench.NEW_TOKENS[name] == lengths[name]


def test_long_prompts_lose_their_middle():
    words = [f"w{n}" for n in range(6000)]
    record = {"context": " ".join(words), "input": "why", "answers": ["x"]}

    def decode(tokens):
        return " ".join(tokens) + " "

    text = longbench.prompt("qmsum", record, str.split, decode)
    whole = longbench.TEMPLATES["qmsum"].format(**record).split()
    assert text.split() == whole[:2048] + whole[-2048:]
    short = record | {"context": "a b c"}
    assert longbench.prompt("qmsum", short, str.split, decode) == longbench.TEMPLATES["qmsum"].format(**short)


def test_qmsum_is_rebuilt_from_the_meetings():
    meeting = {
        "meeting_transcripts": [{"speaker": "A", "content": "Hello ."}, {"speaker": "B", "content": "Yes ."}],
        "general_query_list": [{"query": "Sum up.", "answer": "They met."}],
        "specific_query_list": [{"query": "Who?", "answer": "A and B.", "relevant_text_span": [["0", "1"]]}],
    }
    assert list(qmsum_rows(meeting)) == [
        {"context": "A: Hello .\nB: Yes .", "input": "Sum up.", "answers": ["They met."]},
        {"context": "A: Hello .\nB: Yes .", "input": "Who?", "answers": ["A and B."]},
    ]


def test_the_original_qmsum_has_281_queries():
    assert len(Source.of("longbench", str(data_folder("longbench"))).read("qmsum")["test"]) == 281


def test_records_are_read_by_subtask(tmp_path):
    write_lines(tmp_path / "test_all.jsonl", [{"category": c, "n": n} for n, c in enumerate(["math", "law", "math"])])
    write_lines(tmp_path / "validation.jsonl", [{"category": "math", "n": 9}])
    source = Source.of("mmlu-pro", str(tmp_path))
    found = source.read("math")
    assert [row["n"] for row in found["test"]] == [0, 2]
    assert [row["n"] for row in found["validation"]] == [9]
    with pytest.raises(AatcError, match="no test records of computer_science"):
        source.read("computer_science")
    write_lines(tmp_path / "trec.jsonl", [{"context": "c", "question": "q"}, {"context": "c", "input": "i"}])
    assert [row["input"] for row in Source.of("longbench", str(tmp_path)).read("trec")["test"]] == ["q", "i"]
    with pytest.raises(AatcError, match=r"has no file lcc\.jsonl"):
        Source.of("longbench", str(tmp_path)).read("lcc")
    for line in ("{", "[1]"):
        (tmp_path / "test.jsonl").write_text(line)
        with pytest.raises(AatcError, match=r"are no JSON objects|cannot be read"):
            Source.of("gsm8k", str(tmp_path)).read("gsm8k")
    with pytest.raises(AatcError, match="there is no folder"):
        Source.of("gsm8k", str(tmp_path / "absent"))
    assert Source.of("gsm8k", "hub").folder is None


def test_subtasks_are_chosen_by_name():
    assert chosen_subtasks("mmlu-pro", []) == ["math", "computer_science"]
    assert chosen_subtasks("longbench", ["*sum", "lcc"]) == ["samsum", "lcc", "qmsum"]
    with pytest.raises(UsageError, match="'hotpotqa'"):
        chosen_subtasks("longbench", ["hotpotqa"])


def test_prompts_of_questions_and_problems():
    record = {"question": "One?", "options": ["yes", "no"], "answer": "B", "problem": "$1+1$"}
    assert harness.mmlu_prompt(record) == "Question:\nOne?\nOptions:\nA. yes\nB. no\nAnswer:"
    assert "Problem:\n$1+1$\n" in harness.math_prompt(record)
    assert "\\boxed{}" in harness.math_prompt(record)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x^{2}} }", "x^{2}"),
        ("none", None),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a\boxed{b}}", "b"),
    ],
)
def test_the_last_closed_box_is_the_answer(text, answer):
    assert harness.last_boxed(text) == answer


def test_absent_packages_are_named(monkeypatch):
    monkeypatch.setattr(harness, "_NEEDED", ("json", "no_such_module"))
    with pytest.raises(AatcError, match="needs no_such_module") as caught:
        harness.require_harness()
    assert "pip install 'aatc[bench]'" in caught.value.hint


@needs_harness
@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
        ("27", "28", False),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        ("x^2+1", "1+x^2", True),
        ("27", None, False),
    ],
)
def test_answers_of_problems_are_compared_as_mathematics(gold, answer, same):
    assert harness.same_answer(gold, answer) is same


@needs_harness
def test_math_500_agrees_with_itself():
    rows = Source.of("math-500", str(data_folder("math500"))).read("math-500")["test"]
    # the reference solution of every tenth problem boxes the reference answer
    assert all(harness.same_answer(r["answer"], harness.last_boxed(r["solution"])) for r in rows[::10])
    wrong = [harness.same_answer(a["answer"], b["answer"]) for a, b in zip(rows[::10], rows[1::10], strict=True)]
    assert sum(wrong) < 4


@needs_harness
def test_longbench_scores():
    record = {"answers": ["The cat", "a dog"], "all_classes": ["Date", "Number", "Animal"]}
    assert longbench.best_score("triviaqa", record, "cat!\nnot this") == 1.0
    assert longbench.best_score("qasper", record, "cat and mouse") == pytest.approx(0.5)
    assert longbench.best_score("trec", record | {"answers": ["Number"]}, "Number\nDate") == 1.0
    assert longbench.best_score("trec", record | {"answers": ["Number"]}, "Number Date") == 0.5
    assert longbench.best_score("lcc", record | {"answers": ["x = 1"]}, "# why\n\nx = 1\nelse") == 1.0
    # the longest common subsequence of "a b c d" and "a c d" is 3: precision 1, recall 3/4
    assert longbench.best_score("qmsum", record | {"answers": ["a b c d"]}, "a c d") == pytest.approx(6 / 7, abs=1e-6)


@pytest.mark.slow
@pytest.mark.real
@needs_harness
@pytest.mark.parametrize(
    ("benchmark", "folder", "subtask"),
    [("gsm8k", "gsm8k", "gsm8k"), ("mmlu-pro", "mmlu_pro", "math"), ("longbench", "longbench", "qmsum")],
)
def test_real_records_on_a_real_model(aatc, real_model_path, tmp_path, benchmark, folder, subtask):
    run = ("--run", tmp_path / "run")
    for command in (
        ("collect", "--model", real_model_path, "--text", "builtin:python-docs", "--samples", 2, "--length", 256),
        ("whiten",),
        ("allocate", "--budget", 4),
    ):
        assert aatc(*command, *run).code == 0
    asked = aatc(
        "eval",
        benchmark,
        "--data",
        data_folder(folder),
        "--subtask",
        subtask,
        "--limit",
        1,
        *run,
        "--model",
        real_model_path,
        "--recipe",
        "fp16",
        "--recipe",
        "paper",
        "--budget",
        4,
        "--json",
    )
    assert asked.code == 0, asked.err
    results = json.loads(asked.out[asked.out.index("[") :])
    assert [r["recipe"] for r in results] == ["fp16", "paper"]
    for result in results:
        assert [(row["subtask"], row["samples"]) for row in result["rows"]] == [(subtask, 1)]
        assert 0 <= result["rows"][0]["score"] <= 1
