"""Shared fixtures: tiny models made on disk in seconds, and the real small model where it is available."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

REAL_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_configure(config):
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("AATC_RUN", "AATC_MODEL"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The SmolLM2 file that ``make model`` fetches; its folder can be named by AATC_MODELS."""
    folder = Path(os.environ.get("AATC_MODELS", Path(__file__).parent.parent / ".models"))
    path = folder / REAL_MODEL
    if not path.is_file():
        pytest.skip(f"{path} is not there: make model fetches it")
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
    """Save a random 4-layer model of ``family`` ("llama", "qwen2" with biases, "qwen3" with key norms) with a tokenizer.

    Geometry: 4 query heads, 2 kv heads of 16, hidden size 64, context 512; override by keyword.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 256, "tie_word_embeddings": False,
    } | changes  # fmt: skip
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
