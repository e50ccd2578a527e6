"""The server of vLLM as `aatc serve` starts it: a chat, requests that cannot be, and an engine that is killed.

    python tests/serve/live_server.py --model FOLDER --plan FOLDER [--memory 0.3]

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
from pathlib import Path

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
    parser.add_argument("--memory", default="0.3")
    parser.add_argument("--wait", type=float, default=150)
    given = parser.parse_args()
    more = ("--port=8765", "--host=127.0.0.1", f"--gpu-memory-utilization={given.memory}", "--served-model-name=it")
    more += ("--kv-cache-memory-bytes=1073741824", "--dtype=bfloat16")
    command = ["serve", "--plan", given.plan, "--model", given.model, "--max-model-len", "2048", "--max-num-seqs", "8"]
    command += [f"--vllm={argument}" for argument in more]
    printed = subprocess.run([sys.executable, "-m", "aatc_cli", *command], capture_output=True, text=True, check=False)
    say(printed=printed.stdout.strip(), told=printed.stderr.strip().splitlines(), code=printed.returncode)
    wrong = [sys.executable, "-m", "aatc_cli", "serve", "--plan", given.plan, "--model", given.model]
    refused = subprocess.run([*wrong, "--vllm=--block-size=16"], capture_output=True, text=True, check=False)
    say(refused=refused.stderr.strip().splitlines(), code=refused.returncode)
    server = subprocess.Popen([sys.executable, "-m", "aatc_cli", *command, "--start"], stdout=sys.stderr)
    try:
        while ask("/health", seconds=2)[0] != 200:
            if server.poll() is not None or time.time() - STARTED > given.wait:
                say(started=False, code=server.poll())
                return
            time.sleep(0.5)
        say(started=True)
        questions(server)
    finally:
        for process in [*children(server.pid), server.pid] if server.poll() is None else []:
            os.kill(process, signal.SIGKILL)


def questions(server: subprocess.Popen) -> None:
    chat = {"model": "it", "temperature": 0, "max_tokens": 40}
    chat["messages"] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    before = time.time()
    status, text = ask("/v1/chat/completions", chat)
    answer = json.loads(text)["choices"][0]["message"]["content"] if status == 200 else text[:500]
    say(chat=status, answer=answer, seconds=round(time.time() - before, 2))
    long = chat | {"messages": [{"role": "user", "content": "word " * 3000}]}
    status, text = ask("/v1/chat/completions", long)
    say(longer_than_the_model=status, answer=text[:300])
    engine = [p for p in children(server.pid) if "EngineCore" in Path(f"/proc/{p}/comm").read_text() + title(p)]
    say(engine_processes=engine)
    for process in engine[:1]:
        os.kill(process, signal.SIGKILL)
    before = time.time()
    status, text = ask("/v1/chat/completions", chat, seconds=30)
    say(after_the_engine_was_killed=status, answer=text[:300], seconds=round(time.time() - before, 2))
    try:
        say(server_ended=server.wait(30), seconds=round(time.time() - before, 2))
    except subprocess.TimeoutExpired:
        say(server_ended=None)


def title(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


if __name__ == "__main__":
    main()
