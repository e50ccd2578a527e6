"""The command that starts vLLM with a plan: everything the backend asks for, checked before anything is started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.shipped import find_plan
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.limits import context_limit
from aatc_cli.models.loading import ModelSource, find_model
from aatc_cli.serve.opening import require_version
from aatc_cli.serve.vllm_backend.plans import prepare_plan, static_of
from aatc_cli.serve.vllm_backend.start import VERSIONS

# the model runner whose batch the backend reads
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# what the plan or --prefixes decides beside the arguments that are given
_DECIDED = ("--enable-prefix-caching", "--no-enable-prefix-caching", "--kv-cache-dtype", "--kv-transfer-config")
# short for what is decided; and what `start.check_engine` refuses, where it is said later
_SHORT = {"-O": "--compilation-config", "-cc": "--compilation-config"}
_ALONE = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--speculative-config")
_NAME, _CHUNKS = "--served-model-name", "--enable-chunked-prefill"


@dataclass(frozen=True)
class ServeCommand:
    """``arguments`` of vLLM, and what the plan takes: bytes of 64 tokens and of the exact rows of one request.

    uncompressed: bytes of 64 tokens in 16 bits. version: of the vLLM that is installed here, or None.
    """

    plan: str
    arguments: tuple[str, ...]
    block_bytes: int
    uncompressed: int
    exact_bytes: int
    version: str | None

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return shlex.join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), *self.arguments])

    def start(self) -> None:
        """Run that command until it ends, which SIGTERM asks of it too.

        Raises `AatcError` where vLLM is not installed, and with the plan's name for a server that ended unasked.
        """
        if self.version is None:
            raise AatcError("vLLM is not installed here", f"pip install vllm=={VERSIONS[0]}0, or run what is printed")
        status = _run(self.arguments)
        if status is not None:
            # the server of a dead engine ends as if it had been asked to
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            raise AatcError(f"the server of {self.plan} ended {how}, unasked", "what it said last is above")


@dataclass(frozen=True)
class Wanted:
    """Texts of ``length`` tokens at most (None: as the model can), ``requests`` at once, prefixes shared or not."""

    length: int | None = None
    requests: int = 64
    prefixes: bool = False


def serve_command(plan: str, model: str, wanted: Wanted, others: list[str]) -> ServeCommand:
    """The command that serves ``model`` with ``plan`` as ``wanted``.

    others: more arguments of vLLM. Raises `AatcError` naming what will not work: version, plan, model or argument.
    """
    installed = installed_version()
    opened, source = Plan.open(find_plan(plan if plan.startswith("hub:") else Path(plan))), find_model(model)
    prepared = prepare_plan(opened, source)
    form = static_of(prepared, torch.float32, torch.device("cpu"))
    limit = context_limit(prepared.model.config)
    if wanted.length is not None and limit is not None and wanted.length > limit:
        problem = f"the model reads {limit} tokens at most, not {wanted.length}"
        raise AatcError(problem, f"give --max-model-len {limit}")
    length = wanted.length or limit
    if length is None:
        raise UsageError("the model does not say how long its texts may be", "give --max-model-len")
    geometry, window = opened.geometry, opened.recipe.window
    sinks = TILE if wanted.prefixes else window.sinks
    token = 2 * geometry.layers * geometry.channels * 2
    return ServeCommand(
        opened.name,
        _arguments(_name(source, model), (plan, opened.served_as), replace(wanted, length=length), others),
        sum(fused.layer.held.nbytes for fused in form.layers),
        TILE * token,
        (2 if _in_float32(others) else 1) * (sinks + window.recent) * token,
        installed,
    )


def _run(arguments: Sequence[str]) -> int | None:
    """The status of a command; negative where a signal ended it, None where this process was told to end it."""
    told: list[int] = []
    # a terminal sends its interrupt to both; a child that is being started is asked as soon as it is there
    before = {number: signal.signal(number, lambda n, _: told.append(n)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(arguments, env=os.environ | ENVIRONMENT)
        while True:
            try:
                status = process.wait(0.2)
                return None if told else status
            except subprocess.TimeoutExpired:
                if told and told[-1] == signal.SIGTERM:
                    told.append(0)
                    process.terminate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def installed_version() -> str | None:
    """The vLLM that is installed here, or None; raises `AatcError` for one that the backend does not know."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return None
    return require_version("vllm", VERSIONS)


def graphs(requests: int) -> dict[str, object]:
    """Graphs of steps that only decode, of few sizes up to ``requests``; prompts run as they are."""
    sizes = [size for size in (2**n for n in range(requests.bit_length())) if size < requests]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*sizes, requests]}


def _arguments(model: str, plan: tuple[str, str], wanted: Wanted, others: list[str]) -> tuple[str, ...]:
    """The whole command; plan: where it is, and the name by which the server says that it serves with it."""
    asked: dict[str, object] = {"prefixes": True} if wanted.prefixes else {}
    where = plan[0] if plan[0].startswith("hub:") else str(Path(plan[0]).resolve())
    fixed = {
        "--attention-backend": "CUSTOM",
        "--block-size": str(TILE),
        "--max-model-len": str(wanted.length),
        "--max-num-seqs": str(wanted.requests),
        # the longest prompt is read whole, see below, beside all that decode
        "--max-num-batched-tokens": str(max((wanted.length or 0) + wanted.requests, 2048)),
        "--compilation-config": json.dumps(graphs(wanted.requests)),
        "--additional-config": json.dumps({"aatc": {"plan": where} | asked}),
    }
    for given in others:
        name, equals, _ = given.partition("=")
        if not name:
            raise UsageError("an argument for vLLM is empty", "write --vllm=--NAME=VALUE")
        # vLLM takes --block_size for --block-size, and --compilation-config.mode for a part of that
        full = name.partition(".")[0].replace("_", "-")
        if _SHORT.get(full[:2], _SHORT.get(full, full)) in {*fixed, *_DECIDED}:
            raise UsageError(f"{name} is what the plan decides", "leave it out, or change the printed command")
        if full in _ALONE:
            raise UsageError(f"a plan is served by one worker that does not guess: no {name}", "leave it out")
        if name == _NAME and not equals:
            raise UsageError(f"{_NAME} has no name", f"write --vllm={_NAME}=NAME")
    names = [given.partition("=")[2] for given in others if given.startswith(_NAME)] or [model]
    rest = [given for given in others if not given.startswith(_NAME)]
    parts = [part for pair in fixed.items() for part in pair]
    caching = "--enable-prefix-caching" if wanted.prefixes else "--no-enable-prefix-caching"
    # a prompt that waits until it is read whole attends to itself exactly; its later chunks would read the first packed
    whole = [] if _CHUNKS in rest else [f"--no-{_CHUNKS[2:]}"]
    return ("vllm", "serve", model, _NAME, *names, plan[1], *parts, caching, *whole, *rest)


def _in_float32(others: list[str]) -> bool:
    """Whether arguments ask for a model in float32; vLLM serves in 16 bits where nothing is said."""
    return any(given in ("--dtype=float32", "--dtype=float") for given in others)


def _name(source: ModelSource, model: str) -> str:
    """The model as vLLM takes it; raises `AatcError` for a form that was not tried."""
    if model.endswith(".gguf"):
        raise AatcError(f"{source.name} is a .gguf file", "serve the folder with the model's safetensors")
    return str(Path(model).resolve()) if Path(model).exists() else model
