"""aatc eval ruler end to end: files, rows that are kept, what is left out, scores of a model that can retrieve."""

from __future__ import annotations

import json
import math
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import aatc_cli
from aatc_cli.artifacts.evaluation import Measurement, read_measurement, write_evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.evals import opened
from aatc_cli.evals.answers import asking
from aatc_cli.evals.answers.asking import Asker
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow, indistinguishable
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.models.loading import find_model, load_model, load_tokenizer
from aatc_cli.runtime.attach import prepare

ASKED = ("ruler", "--context", 1024, "--limit", 2, "--subtask", "niah_single_1", "--subtask", "qa_*")


@pytest.fixture
def model(new_model, tmp_path):
    """The model of `base_run` with room for a prompt in bytes."""
    return new_model(tmp_path / "tiny-llama", max_position_embeddings=1100)


@pytest.fixture
def plan_run(model, corpus, tmp_path, aatc):
    run = tmp_path / "run"
    where = ("--run", run)
    for command in (
        ("collect", "--model", model, "--text", corpus, "--samples", 4, "--length", 64, "--rows", 64),
        ("whiten",),
        ("allocate", "--budget", 3),
    ):
        assert aatc(*command, *where).code == 0
    return run


def test_rows_come_one_by_one_and_are_not_run_again(aatc, model, plan_run, monkeypatch):
    everyone = ("eval", *ASKED, "--model", model, "--run", plan_run, "--recipe", "fp16", "--recipe", "paper")
    # neither a dataset library nor a harness is needed
    for name in ("datasets", "lm_eval"):
        monkeypatch.setitem(sys.modules, name, None)
    first = aatc(*everyone, "--budget", 3, "--json")
    assert first.code == 0, first.err
    assert [r["benchmark"] for r in first.json] == ["ruler", "ruler"]
    for result in first.json:
        assert [(row["subtask"], row["context"], row["samples"]) for row in result["rows"]] == [
            ("niah_single_1", 1024, 2)
        ]
        assert set(result["left_out"]) == {"qa_1 at 1024", "qa_2 at 1024"}
        assert "--data" in result["left_out"]["qa_1 at 1024"]
    files = sorted(path.name for path in (plan_run / "evals").glob("*.json"))
    assert [name.rsplit(".", 2)[0] for name in files] == ["benchmark.fp16.ruler", "benchmark.paper-3.ruler"]
    read = read_measurement(plan_run / "evals" / files[1], BenchmarkResult)
    assert json.loads(read.model_dump_json()) == {k: v for k, v in first.json[1].items() if k != "path"}
    # text evaluations of the same folder are read without them
    assert read_evaluations(plan_run / "evals") == []

    # nothing is loaded or asked a second time; another number of samples is another question
    loads = []
    monkeypatch.setattr(opened, "load_model", lambda *a, **k: loads.append(a) or pytest.fail("loaded"))
    again = aatc(*everyone, "--budget", 3, "--json")
    assert again.code == 0, again.err
    assert again.json == first.json
    assert again.err.count("is there already, nothing to do") == 2
    monkeypatch.undo()
    other = aatc(
        "eval",
        *ASKED[:3],
        "--limit",
        1,
        "--subtask",
        "niah_single_1",
        "--model",
        model,
        "--run",
        plan_run,
        "--recipe",
        "fp16",
        "--json",
    )
    assert other.code == 0, other.err
    assert [row["samples"] for row in other.json[0]["rows"]] == [1]
    table = aatc(*everyone, "--budget", 3)
    assert "niah_single_1" in table.out
    assert "paper-3" in table.out


def test_an_interrupted_run_keeps_what_is_done(aatc, model, plan_run, monkeypatch):
    many = (
        "eval",
        "ruler",
        "--context",
        1024,
        "--limit",
        1,
        "--subtask",
        "niah_*key_3",
        "--subtask",
        "niah_single_1",
        "--model",
        model,
        "--run",
        plan_run,
        "--recipe",
        "fp16",
    )
    answers = Asker.answers

    def stop_later(self, what, *rest):
        if "niah_multikey_3" in what:
            raise KeyboardInterrupt
        return answers(self, what, *rest)

    monkeypatch.setattr(Asker, "answers", stop_later)
    assert aatc(*many).code != 0
    [path] = (plan_run / "evals").glob("benchmark.fp16.ruler.*.json")
    done = read_measurement(path, BenchmarkResult)
    assert [row.subtask for row in done.rows] == ["niah_single_1"]
    monkeypatch.undo()
    rest = aatc(*many, "--json")
    assert rest.code == 0, rest.err
    assert [row["subtask"] for row in rest.json[0]["rows"]] == ["niah_single_1", "niah_multikey_3"]
    assert rest.json[0]["rows"][0] == done.rows[0].model_dump(mode="json")
    assert rest.err.count("nothing to do") == 1


def test_what_cannot_be_asked(refuses, model, plan_run):
    common = ("--model", model, "--run", plan_run, "--recipe", "fp16")
    asked = ("eval", "ruler", *common)
    refuses(*asked, "--subtask", "niah", says=("no task 'niah'",), folder=plan_run, code=2)
    refuses(*asked, "--context", 4096, says=("4096", "1100"), folder=plan_run)
    refuses(*asked, "--context", 300, says=("does not fit into a context of 300",), folder=plan_run)
    refuses(*asked, "--chat", says=("no chat template",), folder=plan_run)
    refuses(*asked, "--data", plan_run / "absent", says=("there is no folder",), folder=plan_run)


@pytest.mark.real
def test_smollm2_finds_the_needle(real_model_path, aatc, tmp_path):
    asked = aatc(
        "eval",
        "ruler",
        "--context",
        512,
        "--limit",
        2,
        "--subtask",
        "niah_single_1",
        "--batch",
        2,
        "--model",
        real_model_path,
        "--run",
        tmp_path / "run",
        "--recipe",
        "fp16",
        "--json",
    )
    assert asked.code == 0, asked.err
    assert asked.json[0]["rows"][0]["score"] == 1.0
    assert asked.json[0]["rows"][0]["stderr"] == 0.0


def test_every_field_is_documented():
    page = (Path(aatc_cli.__file__).parent.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    own = set(BenchmarkResult.model_fields) - set(Measurement.model_fields)
    missing = [name for name in (*BenchmarkRow.model_fields, *own) if f"| `{name}` |" not in page]
    assert missing == []


def row(score, stderr, samples=4):
    return BenchmarkRow(
        subtask="vt", context=9, metric="m", score=score, stderr=stderr, samples=samples, prompts_sha256="", seconds=0.0
    )


def test_two_standard_errors_decide():
    assert indistinguishable(row(0.5, 0.1), row(0.7, 0.1)) is True
    assert indistinguishable(row(0.5, 0.09), row(0.7, 0.09)) is False
    # a score without spread is compared by the other's error
    assert indistinguishable(row(1.0, 0.0), row(0.9, 0.06)) is True
    assert indistinguishable(row(1.0, None), row(0.9, 0.06)) is None


def test_answers_to_the_same_prompts_are_compared_one_by_one():
    def answers(scores, prompts="p"):
        mean = sum(scores) / len(scores)
        return row(mean, 0.05, len(scores)).model_copy(update={"scores": scores, "prompts_sha256": prompts})

    base = answers([1.0] * 30 + [0.0] * 10)
    # 7 of 40 lost and none won is no chance (1/64), although both errors are as wide as the gap
    worse = answers([0.0] * 7 + [1.0] * 23 + [0.0] * 10)
    assert indistinguishable(worse, base) is False
    assert indistinguishable(answers([0.0] * 5 + [1.0] * 25 + [0.0] * 10), base) is True
    # of other prompts the errors decide
    assert indistinguishable(worse.model_copy(update={"stderr": 0.1, "prompts_sha256": "q"}), base) is True


def test_standard_errors_are_those_of_the_samples(aatc, model, plan_run, monkeypatch):
    scores = iter([1.0, 0.0, 0.25, 0.25])
    monkeypatch.setattr(asking, "score", lambda *a: next(scores))
    monkeypatch.setattr(asking, "generate", lambda m, k, batch, caches, *a: [[[1]] * batch.ids.shape[0]])
    asked = aatc(
        "eval",
        "ruler",
        "--context",
        1024,
        "--limit",
        4,
        "--subtask",
        "niah_single_1",
        "--batch",
        3,
        "--model",
        model,
        "--run",
        plan_run,
        "--recipe",
        "fp16",
        "--json",
    )
    found = asked.json[0]["rows"][0]
    assert found["score"] == 0.375
    # by hand: deviations 0.625, -0.375, -0.125, -0.125; their squares sum to 0.5625
    assert found["stderr"] == pytest.approx(math.sqrt(0.5625 / 3 / 4), rel=1e-12)


def test_rows_of_another_process_are_kept(aatc, model, plan_run, monkeypatch):
    """Two calls with other subtasks write one file: each changes what the other has written."""
    asked = ("eval", "ruler", "--context", 1024, "--limit", 1, "--model", model, "--run", plan_run, "--recipe", "fp16")
    other = BenchmarkRow(
        subtask="vt", context=1024, metric="m", score=1.0, stderr=None, samples=1, prompts_sha256="p", seconds=0.0
    )
    answers = Asker.answers

    def meanwhile(self, what, *rest):
        [path] = (plan_run / "evals").glob("benchmark.fp16.ruler.*.json")
        write_evaluation(plan_run / "evals", read_measurement(path, BenchmarkResult).with_row(other))
        return answers(self, what, *rest)

    assert aatc(*asked, "--subtask", "niah_single_1").code == 0
    monkeypatch.setattr(Asker, "answers", meanwhile)
    outcome = aatc(*asked, "--subtask", "niah_multikey_3", "--json")
    assert outcome.code == 0, outcome.err
    assert {row["subtask"] for row in outcome.json[0]["rows"]} == {"niah_single_1", "niah_multikey_3", "vt"}
    monkeypatch.undo()
    forced = aatc(*asked, "--subtask", "niah_single_1", "--force", "--json")
    assert [row["subtask"] for row in forced.json[0]["rows"]] == ["niah_single_1"]


@pytest.fixture
def serve(model):
    """Start a server of completions over the model and a cache that a test gives; -> its address."""
    running = []

    def start(names, answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                known = {"/v1/models": {"data": [{"id": name} for name in names]}, "/version": {"version": "0.23.0"}}
                self.give(200, known[self.path])

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    assert asked["model"] in names
                    found = answer(asked["prompt"], asked["max_tokens"])
                    if isinstance(found, bytes):
                        self.send_response(200)
                        self.send_header("Content-Length", "500")
                        self.end_headers()
                        self.wfile.write(found)
                    else:
                        self.give(200, {"choices": [{"text": found}]})
                except ValueError as error:
                    self.give(400, {"error": {"message": str(error)}})

            def give(self, status, body):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_server_answers_in_place_of_the_model(aatc, refuses, model, plan_run, serve):
    """The scores of a server that generates as the command does are those of the command."""
    plan = Plan.open(plan_run / "plans" / "paper-3")
    source = find_model(str(model))
    loaded, tokenizer, lock = load_model(source), load_tokenizer(source), threading.Lock()
    session = prepare(loaded, plan)

    def answer(tokens, room):
        ids = torch.tensor([tokens])
        with lock, session.attached(), torch.no_grad():
            cache = {session.keyword: session.new_cache()}
            out = loaded.generate(ids, max_new_tokens=room, do_sample=False, pad_token_id=0, **cache)
        return tokenizer.raw.decode(out[0, len(tokens) :], skip_special_tokens=True)

    where = ("--model", model, "--run", plan_run, "--json")
    asked = ("eval", "ruler", "--context", 1024, "--limit", 2, "--subtask", "niah_single_1", *where)
    named = ("--plan", plan.path)
    own = aatc(*asked, *named).json[0]
    address = serve(["it", plan.served_as], answer)
    found = aatc(*asked, *named, "--server", address + "/v1/", "--batch", 2)
    assert found.code == 0, found.err
    [result] = found.json
    assert (result["benchmark"], result["cache"]) == ("ruler-served", "server")
    assert (result["device"], result["dtype"]) == ("server", "server")
    assert result["protocol"]["server"] == {"version": "0.23.0", "plan": plan.served_as}
    [row], [wanted] = result["rows"], own["rows"]
    assert (row["scores"], row["prompts_sha256"]) == (wanted["scores"], wanted["prompts_sha256"])

    # it is taken at its word alone: another plan, none, several caches, what the server decides
    told = {"folder": plan_run}
    other = serve(["it", "paper-2@0123456789ab"], answer)
    refuses(*asked, *named, "--server", other, says=("paper-2@0123456789ab", plan.served_as), **told)
    refuses(*asked, *named, "--server", serve(["it"], answer), says=("without a plan that it names",), **told)
    refuses(*asked, "--recipe", "fp16", "--server", other, says=("paper-2@0123456789ab",), **told)
    refuses(*asked, *named, "--recipe", "fp16", "--server", address, says=("one cache",), code=2, **told)
    refuses(*asked, *named, "--server", address, "--dtype", "float32", says=("--dtype",), code=2, **told)
    refuses(*asked, *named, "--server", address, "--mode", "forced", says=("generates",), code=2, **told)
    refuses(*asked, *named, "--server", "ftp://here", says=("no address",), **told)
    refuses(*asked, *named, "--server", "http://127.0.0.1:9", says=("does not answer",), **told)

    def too_long(tokens, room):
        raise ValueError("maximum context length is 8")

    short = serve([plan.served_as], too_long)
    refuses(*asked, *named, "--force", "--server", short, says=("400", "maximum context length is 8"), **told)


@pytest.mark.parametrize(
    ("names", "answer", "says"),
    [
        (["SmolLM2"], "1234", "serves SmolLM2, and"),
        ([None], "1234", "names no model"),
        (["other/{}"], None, "has no text"),
        (["other/{}"], 7, "has no text"),
        (["other/{}"], b'{"choices": [{"te', "gave no answer of a server of completions"),
        (["other/{}"], b"", "gave no answer of a server of completions"),
    ],
)
def test_half_an_answer_is_no_score(refuses, model, plan_run, serve, names, answer, says):
    """Nothing but text of the model that was asked for is scored; the run stays as it was."""
    address = serve([name and name.format(model.name) for name in names], lambda tokens, room: answer)
    asked = ("eval", "ruler", "--context", 1024, "--limit", 1, "--subtask", "niah_single_1", "--recipe", "fp16")
    asked = (*asked, "--model", model, "--run", plan_run, "--server")
    refuses(*asked, address, says=(says,), folder=plan_run)


@pytest.mark.parametrize("address", ["http://a b:1", "http://[::1", "http://127.0.0.1:port", ""])
def test_an_address_that_is_none(refuses, model, plan_run, address):
    asked = ("eval", "ruler", "--context", 1024, "--recipe", "fp16", "--model", model, "--run", plan_run)
    refuses(*asked, "--server", address, says=("address" if not address else "gave no answer",), folder=plan_run)
