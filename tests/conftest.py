"""Shared fixtures: tiny models made on disk in seconds, and the real small model where it is available."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec

REAL_MODEL = "SmolLM2-135M-Instruct"


def pytest_configure(config):
    # several test runs share a machine: threads that spin for a core slow all of them down
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1)))
    os.environ["HF_HUB_OFFLINE"] = "1"
    # nothing of a test is remembered for the next run, or read from the home of whoever runs it
    cache = tempfile.mkdtemp(prefix="aatc-tests-")
    os.environ["XDG_CACHE_HOME"] = cache
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    for name in ("AATC_RUN", "AATC_MODEL"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The SmolLM2 folder that ``make model`` brings; the folder it lies in can be named by AATC_MODELS."""
    folder = Path(os.environ.get("AATC_MODELS", Path(__file__).parent.parent / ".models"))
    path = folder / REAL_MODEL
    if not (path / "config.json").is_file():
        pytest.skip(f"{path} is not there: make model brings it")
    return path


def make_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer (one token per byte, no merges) into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary["<end>"] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(folder)


def make_model(folder: Path, family: str = "llama", seed: int = 0, **changes) -> Path:
    """Save a random 4-layer model of ``family`` with a tokenizer: "llama", "qwen2" (biases), "qwen3" (key norms).

    Geometry: 4 query heads, 2 kv heads of 16, hidden size 64, context 512; override by keyword.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 260,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 256,
        "tie_word_embeddings": False,
    } | changes
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 1.0)
            elif "norm" not in name:
                # larger than the default initialisation, so that attention is far from uniform
                parameter.normal_(0, 0.15)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Folder of a tiny random Llama."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory) -> Path:
    """Folder of a tiny random Qwen2, whose projections have biases."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-qwen2", family="qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory) -> Path:
    """Folder of a tiny random Qwen3, whose queries and keys are normalised before RoPE."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", family="qwen3")


@pytest.fixture
def calibration_text(tmp_path) -> Path:
    """A text file with enough English-like bytes for a few windows of a tiny model."""
    path = tmp_path / "calibration.txt"
    words = "the cache holds keys and values of every token that the model has seen so far and grows with the context "
    path.write_text("".join(f"{index}: {words}" for index in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A text of some thousand bytes in which no two windows are alike."""
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = "the cache holds keys and values (of every token) the model has seen so far, and grows with its context"
    lines = [" ".join(words.split()[i % 7 :: 1 + i % 3]) + f" {i * i % 977}." for i in range(400)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line left: exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout; fails when there is anything else on it."""
        return json.loads(self.out)


@pytest.fixture
def aatc(monkeypatch, capfd) -> Callable[..., Outcome]:
    """Run the command line in this process, through its own entry point."""
    from aatc_cli.__main__ import main

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["aatc", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capfd.readouterr()
        return Outcome(stop.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], dict[str, tuple[str, int]]]:
    """Every file under a folder with its hash and time, and every folder; not the lock, which is of no artifact."""

    def take(folder: Path) -> dict[str, tuple[str, int]]:
        found = {}
        for path in sorted(folder.rglob("*")) if folder.exists() else []:
            if path.name != ".lock":
                content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
                found[str(path.relative_to(folder))] = (content, path.stat().st_mtime_ns if path.is_file() else 0)
        return found

    return take


@pytest.fixture
def refuses(aatc, snapshot) -> Callable[..., Outcome]:
    """Run a command that must fail: its code, one Error line with all of ``says``, one Hint line, nothing touched."""

    def run(*arguments: object, says: tuple[str, ...], folder: Path, code: int = 1) -> Outcome:
        before = snapshot(folder)
        outcome = aatc(*arguments)
        errors = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
        hints = [line for line in outcome.err.splitlines() if line.startswith("Hint: ")]
        assert outcome.code == code, outcome.err
        assert len(errors) == len(hints) == 1, outcome.err
        assert "Traceback" not in outcome.err
        assert outcome.out == ""
        for part in says:
            assert part in errors[0], errors[0]
        assert snapshot(folder) == before
        return outcome

    return run


@pytest.fixture(scope="session")
def new_model() -> Callable[..., Path]:
    """The maker of tiny models, for tests that need one of their own."""
    return make_model


@pytest.fixture(scope="session")
def base_run(tiny_llama, corpus, tmp_path_factory) -> Path:
    """A run of the tiny Llama with Stats, both transforms and one plan; shared, so nothing may write to it."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.config import make_budget
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import TextMixture, load_recipe
    from aatc_cli.stages.allocate import allocate
    from aatc_cli.stages.collect import CollectOptions, collect
    from aatc_cli.stages.whiten import Wanted, whiten

    run = Run(tmp_path_factory.mktemp("base") / "run")
    settings = CollectSettings(samples=8, length=64, rows=256)
    mixture = TextMixture(sources=[str(corpus)], samples=8, length=64)
    collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    for kind in ("whiten", "identity"):
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted(transform=kind))
    allocate(run, load_recipe("paper"), [make_budget(bits=3.0)])
    return run.root


@pytest.fixture
def run_folder(base_run, tmp_path) -> Path:
    """A copy of `base_run` that the test owns."""
    return Path(shutil.copytree(base_run, tmp_path / "run"))


def make_codec(
    channels: int, groups: int, bits, seed: int = 0, quantizer: str = "uniform-token-max", dtype=torch.float64
):
    """One site. ``bits`` is a width, a list of widths, or "mixed" for random widths 0..16 with many zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = channels // groups
    encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64)
    encode = encode + 3 * torch.eye(size, dtype=torch.float64)
    if bits == "mixed":
        widths = torch.randint(0, 17, (channels,), generator=generator)
        widths[torch.rand(channels, generator=generator) < 0.3] = 0
    elif isinstance(bits, int):
        widths = torch.full((channels,), bits)
    else:
        widths = torch.tensor(bits)
    return TransformCodec(
        encode=encode,
        decode=torch.linalg.inv(encode),
        bits=widths,
        scale=torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5,
        variance=torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5,
        quantizer=quantizer,
    ).to("cpu", dtype)


def make_codecs(layers: int, channels: int, groups: int, bits, seed: int = 0, **options):
    """Codecs of a whole model, every site with its own transform."""
    return [
        {side: make_codec(channels, groups, bits, seed + 2 * layer + i, **options) for i, side in enumerate(SIDES)}
        for layer in range(layers)
    ]


@pytest.fixture(scope="session")
def codec() -> Callable[..., TransformCodec]:
    return make_codec


@pytest.fixture(scope="session")
def codecs() -> Callable[..., list]:
    return make_codecs


@pytest.fixture(scope="session")
def measured() -> Callable[..., list[Any]]:
    """Run one task of eval on subjects, as the command line does; its results."""
    from aatc_cli.evals import find_task
    from aatc_cli.evals.call import Call
    from aatc_cli.evals.subjects import EvalOptions
    from aatc_cli.models.source import find_model

    def run_task(task, run, model, subjects, options=None, **asked) -> list[Any]:
        found = find_task(task)
        if "text" in asked:
            asked["text"] = tuple(map(str, asked["text"]))
        call = Call(run, options or EvalOptions(), find_model(str(model)), subjects=subjects)
        return list(found.call()(found, call, found.part("settings", "Settings")(**asked)))

    return run_task


@pytest.fixture
def float64():
    """Sums of attention, which add in another order in one pass than token by token: near ties would fall apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
