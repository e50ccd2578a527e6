"""What the tests of the fused cache share, on a CPU and on a GPU: small models, and logits token by token."""

from __future__ import annotations

from collections.abc import Callable
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
