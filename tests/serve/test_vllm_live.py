"""vLLM itself with the backend, where it is installed beside a GPU that has the kernels: make test-vllm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(scope="module", params=["tiny", "real"])
def served(request, tmp_path_factory, new_model):
    """(model, plan) of a tiny Llama with heads of 64, and of SmolLM2."""
    folder = tmp_path_factory.mktemp("vllm")
    if request.param == "tiny":
        model = new_model(folder / "model", head_dim=64, num_hidden_layers=2, max_position_embeddings=2048)
    else:
        model = request.getfixturevalue("real_model_path")
    run = folder / "run"
    options = ("--text", "builtin:python-docs", "--samples", "8", "--fisher", "8", "--length", "512")
    options += ("--device", "cuda", "--dtype", "float32")
    for command in (
        ("collect", *options, "--model", str(model)),
        ("whiten", "--recipe", "loss-aware-tiles-even"),
        ("allocate", "--recipe", "loss-aware-tiles-even", "--budget", "2"),
    ):
        subprocess.run([sys.executable, "-m", "aatc_cli", *command, "--run", str(run)], check=True, cwd=ROOT)
    return model, run / "plans" / "loss-aware-tiles-even-2"


def run(*arguments: str) -> dict[str, Any]:
    """What a run of vLLM in a process of its own says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "serve" / "live_vllm.py"), *arguments, "--memory", "0.05"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


# all prompts against `generate` once; without graphs a part of them, since that is what takes the time
EAGER, GRAPHS = ["--alone", "16", "--references", "16"], ["--graphs", "--sizes", "1", "8", "64", "--room", "0.8"]


@pytest.mark.parametrize("options", [EAGER, GRAPHS], ids=["eager", "graphs-preempted"])
def test_vllm_generates_what_the_fused_cache_does(served, options):
    model, plan = served
    found = run("correct", "--model", str(model), "--plan", str(plan), *options)
    for name in ("alone_against_batched", "batched_against_fused", "alone_against_fused"):
        assert found[name]["equal"] == found[name]["of"], found[name]
    assert bool(found["preempted"]) == ("--room" in options)


def test_requests_that_share_prefixes_are_answered_alike_again(served):
    model, plan = served
    found = run("shared", "--model", str(model), "--plan", str(plan), "--graphs", "--prompts", "8")
    assert found["hits"] > 0
    for name in ("again_against_first", "together_against_again", "first_against_fused", "hits_against_fused"):
        assert found[name]["equal"] == found[name]["of"], found[name]
