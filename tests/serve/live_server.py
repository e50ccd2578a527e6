"""The server of vLLM as `aatc serve` starts it: chats, requests that cannot be, RULER, and an engine that is killed.

    python tests/serve/live_server.py --model FOLDER --plan FOLDER [--memory 0.3] [--ruler 16]

Every line of the output is one JSON document. Needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STARTED = time.time()
BASE = "http://127.0.0.1:8765"


def say(**facts) -> None:
    print(json.dumps({"at": round(time.time() - STARTED, 1)} | facts), flush=True)


def ask(path: str, body: dict | None = None, seconds: float = 60) -> tuple[int, str]:
    """Status and text of an answer; 0 where there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (OSError, TimeoutError) as error:
        return 0, repr(error)


def children(process: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--memory", default="0.1")
    parser.add_argument("--wait", type=float, default=150)
    parser.add_argument("--length", type=int, default=4160)
    parser.add_argument("--ruler", type=int, default=0, help="prompts of each subtask of RULER at 4096 tokens")
    parser.add_argument("--prompts", help="a file of those prompts, which is written if it is not there")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further subtask is begun")
    given = parser.parse_args()
    more = ("--port=8765", "--host=127.0.0.1", f"--gpu-memory-utilization={given.memory}", "--served-model-name=it")
    more += ("--kv-cache-memory-bytes=1073741824",)
    length = str(given.length)
    command = ["serve", "--plan", given.plan, "--model", given.model, "--max-model-len", length, "--max-num-seqs", "16"]
    command += [f"--vllm={argument}" for argument in more]
    printed = subprocess.run([sys.executable, "-m", "aatc_cli", *command], capture_output=True, text=True, check=False)
    say(printed=printed.stdout.strip(), told=printed.stderr.strip().splitlines(), code=printed.returncode)
    server = subprocess.Popen([sys.executable, "-m", "aatc_cli", *command, "--start"], stdout=sys.stderr)
    wrong = [sys.executable, "-m", "aatc_cli", "serve", "--plan", given.plan, "--model", given.model]
    refused = subprocess.run([*wrong, "--vllm=--block-size=16"], capture_output=True, text=True, check=False)
    say(refused=refused.stderr.strip().splitlines(), code=refused.returncode)
    try:
        while ask("/health", seconds=2)[0] != 200:
            if server.poll() is not None or time.time() - STARTED > given.wait:
                say(started=False, code=server.poll())
                return
            time.sleep(0.5)
        say(started=True)
        chats(given.length)
        if given.ruler:
            ruler(given)
        killed(server)
    finally:
        for process in [*children(server.pid), server.pid] if server.poll() is None else []:
            os.kill(process, signal.SIGKILL)
    if given.ruler:
        own(given)


CHAT = {
    "model": "it",
    "temperature": 0,
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
}
SUBTASKS = ["niah_single_1", "niah_single_2", "niah_multikey_1", "vt"]


def chats(length: int) -> None:
    """A chat, one that is too long, and one whose answer would be."""
    before = time.time()
    status, text = ask("/v1/chat/completions", CHAT)
    answer = json.loads(text)["choices"][0]["message"]["content"] if status == 200 else text[:500]
    say(chat=status, answer=answer, seconds=round(time.time() - before, 2))
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 2 * length}]}
    status, text = ask("/v1/chat/completions", long)
    say(longer_than_the_model=status, answer=text[:300])
    status, text = ask("/v1/chat/completions", CHAT | {"max_tokens": length})
    say(longer_answer_than_the_model=status, answer=text[:300])


def ruler_jobs(given: argparse.Namespace):
    """Prompts of RULER at 4096 tokens, as `aatc eval ruler` makes them, or as they were made before (``--prompts``)."""
    from aatc_cli.evals.ruler.job import make_jobs
    from aatc_cli.evals.ruler.settings import Settings
    from aatc_cli.models.loading import find_model, load_tokenizer
    from aatc_cli.text.sources import documents, parse_source

    if given.prompts and Path(given.prompts).exists():
        with Path(given.prompts).open("rb") as file:
            jobs = pickle.load(file)
        return jobs, load_tokenizer(find_model(given.model))
    settings = Settings(context=(4096,), limit=given.ruler)
    text = "\n\n".join(document for spec in settings.text for document in documents(parse_source(spec)))
    tokenizer = load_tokenizer(find_model(given.model))
    jobs, left_out = make_jobs(SUBTASKS, settings, tokenizer, text)
    assert not left_out, left_out
    if given.prompts:
        with Path(given.prompts).open("wb") as file:
            pickle.dump(jobs, file)
    return jobs, tokenizer


def scored(job, texts: list[str]) -> float:
    from aatc_cli.text.ruler.score import score

    found = [score(text, sample.prompt.answers, job.metric) for text, sample in zip(texts, job.samples, strict=True)]
    return 100 * sum(found) / len(found)


TEXTS: dict[str, list[str]] = {}


def ruler(given: argparse.Namespace) -> None:
    """RULER through the server's completions, sixteen requests at a time."""
    jobs, _ = ruler_jobs(given)
    for job in jobs:
        if time.time() - STARTED > given.seconds:
            break
        before = time.time()

        def complete(sample, room=job.room) -> str:
            asked = {"model": "it", "prompt": sample.tokens, "max_tokens": room, "temperature": 0}
            status, text = ask("/v1/completions", asked, seconds=120)
            return json.loads(text)["choices"][0]["text"] if status == 200 else f"status {status}: {text[:200]}"

        with ThreadPoolExecutor(16) as pool:
            TEXTS[job.subtask] = list(pool.map(complete, job.samples))
        say(
            ruler_of_the_server=job.subtask,
            score=scored(job, TEXTS[job.subtask]),
            of=len(job.samples),
            first=TEXTS[job.subtask][0][:120],
            seconds=round(time.time() - before, 1),
        )


def own(given: argparse.Namespace, jobs=None) -> None:
    """The same prompts by the fused cache of the same plan without the server."""
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.evals.answers.asking import Asker
    from aatc_cli.models.loading import find_model, load_model, load_tokenizer
    from aatc_cli.runtime.attach import prepare

    tokenizer = load_tokenizer(find_model(given.model))
    jobs = jobs or ruler_jobs(given)[0]
    model = load_model(find_model(given.model), device="cuda", dtype="float32")
    session = prepare(model, Plan.open(Path(given.plan)), "fused")
    options = types.SimpleNamespace(batch=16, device="cuda")
    opened: Any = types.SimpleNamespace(model=lambda: model, tokenizer=tokenizer, options=options)
    subject: Any = types.SimpleNamespace(name=session.name)
    asker = Asker(opened, {session.name: session})
    for job in [job for job in jobs if job.subtask in TEXTS]:
        [found], seconds = asker.answers(job.what, job.samples, job.metric, job.room, [subject])
        texts = [answer.text for answer in found]
        # own answers end where their score cannot rise any more
        alike = sum(a.strip().startswith(b.strip()) for a, b in zip(TEXTS[job.subtask], texts, strict=True))
        say(ruler_of_our_own=job.subtask, score=scored(job, texts), begin_alike=alike, seconds=round(seconds, 1))


def killed(server: subprocess.Popen) -> None:
    """What a client and the server see of an engine that is killed."""
    engine = [p for p in children(server.pid) if "EngineCore" in Path(f"/proc/{p}/comm").read_text() + title(p)]
    say(engine_processes=engine)
    for process in engine[:1]:
        os.kill(process, signal.SIGKILL)
    before = time.time()
    status, text = ask("/v1/chat/completions", CHAT, seconds=30)
    say(after_the_engine_was_killed=status, answer=text[:300], seconds=round(time.time() - before, 2))
    try:
        say(server_ended=server.wait(30), seconds=round(time.time() - before, 2))
    except subprocess.TimeoutExpired:
        say(server_ended=None)


def title(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


if __name__ == "__main__":
    main()
