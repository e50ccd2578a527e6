"""The server of vLLM as `aatc serve` starts it: chats, what cannot be, too few blocks, and an engine that is killed.

    python tests/serve/live_server.py --model FOLDER --plan FOLDER [--vllm=--gpu-memory-utilization=0.1]

Every line of the output is one JSON document. Needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STARTED = time.time()
BASE = "http://127.0.0.1:8765"
AATC = [sys.executable, "-m", "aatc_cli"]
# requests at once, tokens of their prompts and answers: what they hold together grows beyond the blocks there are
REQUESTS, PROMPT, ANSWER = 16, 3000, 320
# tokens of answers that take longer than it takes to kill the engine
LONG = 1100


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
    parser.add_argument("--wait", type=float, default=200)
    parser.add_argument("--length", type=int, default=4160)
    parser.add_argument("--log", default="server.log", help="what the server says")
    parser.add_argument("--vllm", action="append", default=[], help="more arguments of vLLM")
    given = parser.parse_args()
    command = [*AATC, "serve", "--plan", given.plan, "--model", given.model, "--max-model-len", str(given.length)]
    command += ["--max-num-seqs", str(REQUESTS), "--vllm=--served-model-name=it", "--vllm=--host=127.0.0.1"]
    command += [f"--vllm={argument}" for argument in given.vllm]
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    say(printed=json.loads(printed.stdout)["command"], code=printed.returncode)
    block = json.loads(printed.stdout)["block_bytes"]
    # for the prompts there are blocks enough, for the answers there are not
    blocks = REQUESTS * (PROMPT // 64 + 1) + 4
    with Path(given.log).open("w") as log:
        memory = (f"--vllm=--kv-cache-memory-bytes={blocks * block}", "--vllm=--port=8765", "--start")
        server = subprocess.Popen([*command, *memory], stdout=log, stderr=log)
        refused(command, block)
        try:
            while ask("/health", seconds=2)[0] != 200:
                if server.poll() is not None or time.time() - STARTED > given.wait:
                    say(started=False, code=server.poll())
                    return
                time.sleep(0.5)
            say(started=True)
            chats(given.length)
            crowded(Path(given.log))
            killed(server, Path(given.log))
        finally:
            for process in [*children(server.pid), server.pid] if server.poll() is None else []:
                os.kill(process, signal.SIGKILL)


CHAT = {
    "model": "it",
    "temperature": 0,
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
}


def refused(command: list[str], block: int) -> None:
    """What does not start: an argument that the plan decides, and blocks that hold less than one text."""
    for more in (["--vllm=--block-size=16"], [f"--vllm=--kv-cache-memory-bytes={20 * block}", "--vllm=--port=8766"]):
        before = time.time()
        found = subprocess.run([*command, *more, "--start"], capture_output=True, text=True, check=False)
        told = [
            line for line in found.stderr.splitlines() if "loss-aware" in line or line.startswith(("Error", "Hint"))
        ]
        say(refused=more[0], told=told[-4:], code=found.returncode, seconds=round(time.time() - before, 1))


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


def asked(number: int) -> dict:
    """A completion of the length that crowds."""
    prompt = [(7 * i + 13 * number) % 40000 + 100 for i in range(PROMPT)]
    return {"model": "it", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}


def crowded(log: Path) -> None:
    """More tokens than there are blocks for: all are answered whole, and the log names the plan."""
    before = time.time()
    with ThreadPoolExecutor(REQUESTS) as pool:
        found = list(pool.map(lambda n: ask("/v1/completions", asked(n), seconds=120), range(REQUESTS)))
    whole = [status == 200 and json.loads(text)["usage"]["completion_tokens"] == ANSWER for status, text in found]
    told = [line for line in log.read_text().splitlines() if "no block was free" in line]
    say(crowded=dict(Counter(status for status, _ in found)), whole=sum(whole), of=REQUESTS, told=told[-2:])
    say(crowded_seconds=round(time.time() - before, 1))


def killed(server: subprocess.Popen, log: Path) -> None:
    """What clients, some of them in the middle of an answer, and the server see of an engine that is killed."""
    engine = [p for p in children(server.pid) if "EngineCore" in Path(f"/proc/{p}/comm").read_text() + title(p)]
    say(engine_processes=engine)
    ended: list[float] = []

    def complete(number: int) -> int:
        status, _ = ask("/v1/completions", asked(number) | {"max_tokens": LONG}, seconds=60)
        ended.append(time.time())
        return status

    with ThreadPoolExecutor(REQUESTS) as pool:
        running = [pool.submit(complete, number) for number in range(REQUESTS)]
        # time enough to begin, not to answer
        time.sleep(1.5)
        before = time.time()
        for process in engine[:1]:
            os.kill(process, signal.SIGKILL)
        statuses = Counter(each.result() for each in running)
    say(running_when_killed=dict(statuses), last_after=round(max(ended) - before, 2))
    status, text = ask("/v1/chat/completions", CHAT, seconds=30)
    say(after_the_engine_was_killed=status, answer=text[:300], seconds=round(time.time() - before, 2))
    try:
        code = server.wait(30)
        say(server_ended=code, seconds=round(time.time() - before, 2), told=log.read_text().splitlines()[-2:])
    except subprocess.TimeoutExpired:
        say(server_ended=None)


def title(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


if __name__ == "__main__":
    main()
