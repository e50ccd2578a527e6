"""What the tests of the fused cache share, on a CPU and on a GPU: small models, and logits token by token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama(**shape: int) -> Any:
    """A random Llama of two kv heads of 64 channels and a vocabulary of 97; the rest of its shape is given."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **shape,
    )
    return LlamaForCausalLM(config).eval()


def logits_of(model: Any, cache: Any, keyword: str, ids: Tensor, prompt: int) -> Tensor:
    """Logits behind the prompt and behind every later token, fed one at a time. -> [T - prompt + 1, B, V]."""
    kwargs = {keyword: cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        found = [model(input_ids=ids[:, :prompt], **kwargs).logits[:, -1]]
        found += [model(input_ids=ids[:, t : t + 1], **kwargs).logits[:, -1] for t in range(prompt, ids.shape[1])]
    return torch.stack(found)


@pytest.fixture(scope="session")
def llama_of() -> Callable[..., Any]:
    return make_llama


@pytest.fixture(scope="session")
def token_logits() -> Callable[..., Tensor]:
    return logits_of


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """The kernel of tiles with classes under emulation, compiled once for every shape (`emulator.attend`)."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler of C++")
    spec = spec_from_file_location("emulator", Path(__file__).parent / "emulator.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    attend: Callable[..., Tensor] = partial(module.attend, tmp_path_factory.mktemp("kernels"))
    return attend
