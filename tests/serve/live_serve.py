"""`vllm bench serve` on servers of one geometry with random weights, each with another cache, one after another.

    python tests/serve/live_serve.py --kinds auto plan --tokenizer FOLDER [--layers 32]

All servers are started together and answer in turn, so each takes a share of the card's memory. A plan of random
transforms stands in for one, as in live_bench.py. Every line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import live_vllm
from live_vllm import say

HERE = Path(__file__).parent
PORT = 8770
# what is set up in every process of a server before it makes its engine
PLUGIN = """
import os, sys
def register():
    sys.path.insert(0, {here!r})
    import live_vllm, live_bench
    live_vllm.prepare()
    kind = os.environ["BENCH_KIND"]
    if kind == "plan":
        from aatc_cli.serve.vllm_backend import plugin
        plugin.register()
        live_bench.synthetic_plan({folder!r}, 2.0)
    if kind.startswith("turboquant"):
        live_bench.with_flash_attention_3()
"""


def model_folder(given: argparse.Namespace) -> str:
    """A model of the geometry with a real tokenizer, whose vocabulary it has."""
    import live_bench

    folder = live_bench.geometry_folder(given.folder, given.layers)
    vocabulary = json.loads((Path(given.tokenizer) / "config.json").read_text())["vocab_size"]
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocabulary}))
    for name in Path(given.tokenizer).glob("*token*"):
        shutil.copy(name, folder)
    for name in ("vocab.json", "merges.txt"):
        if (Path(given.tokenizer) / name).exists():
            shutil.copy(Path(given.tokenizer) / name, folder)
    return str(Path(folder).resolve())


def plugin_folder(folder: str) -> str:
    """A folder with a plugin of vLLM, for PYTHONPATH."""
    place = Path("live_serve_plugin").resolve()
    (place / "live_serve_plugin-0.dist-info").mkdir(parents=True, exist_ok=True)
    (place / "live_serve_plugin.py").write_text(PLUGIN.format(here=str(HERE), folder=folder))
    about = place / "live_serve_plugin-0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: live_serve_plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nlive_serve = live_serve_plugin:register\n")
    return str(place)


def start(kind: str, number: int, folder: str, given: argparse.Namespace) -> subprocess.Popen:
    """A server of one cache."""
    longest = given.input + given.output + 64
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--port", str(PORT + number), "--host", "127.0.0.1", "--max-num-seqs", "32"]
    command += ["--max-model-len", str(longest), "--compilation-config", json.dumps(graphs)]
    command += ["--max-num-batched-tokens", "8192", "--no-enable-prefix-caching"]
    command += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(given.memory << 30)]
    if kind == "plan":
        asked = {"aatc": {"plan": "synthetic"}}
        command += ["--attention-backend", "CUSTOM", "--block-size", "64", "--additional-config", json.dumps(asked)]
        command += ["--no-enable-chunked-prefill"]
    else:
        command += ["--kv-cache-dtype", kind]
    path = os.pathsep.join([plugin_folder(folder), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    settings = live_vllm.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path, "BENCH_KIND": kind}
    with Path(f"server-{kind}.log").open("w") as log:
        return subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)


def answers(number: int, server: subprocess.Popen, until: float) -> bool:
    """Whether a server is there before a time; it may have ended."""
    while time.time() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT + number}/health", timeout=2):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    return False


def measured(number: int, folder: str, given: argparse.Namespace) -> dict[str, float]:
    """What vLLM's own client finds."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    asked = [f"--base-url=http://127.0.0.1:{PORT + number}", "--model", folder, "--dataset-name=random"]
    asked += [f"--random-input-len={given.input}", f"--random-output-len={given.output}", "--ignore-eos"]
    asked += [f"--num-prompts={given.prompts}", "--num-warmups=2", "--temperature=0", "--disable-tqdm"]
    found = serve.main(parser.parse_args(asked))
    return {name: round(float(value), 3) for name, value in found.items() if isinstance(value, (int, float))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=["auto", "fp8", "turboquant_4bit_nc", "plan"])
    parser.add_argument("--tokenizer", required=True, help="folder of a model with a tokenizer")
    parser.add_argument("--folder", default="llama-serve")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--input", type=int, default=4096)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--memory", type=int, default=20, help="GiB of blocks of each server")
    parser.add_argument("--seconds", type=float, default=600)
    given = parser.parse_args()
    live_vllm.prepare()
    folder, until = model_folder(given), time.time() + given.seconds
    servers = [start(kind, number, folder, given) for number, kind in enumerate(given.kinds)]
    try:
        from vllm.benchmarks import serve  # noqa: F401

        for number, (kind, server) in enumerate(zip(given.kinds, servers, strict=True)):
            if answers(number, server, until):
                say(kind=kind, layers=given.layers, vllm_bench_serve=measured(number, folder, given))
            else:
                say(kind=kind, started=False, code=server.poll())
    finally:
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
