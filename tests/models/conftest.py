"""Tiny random models of every architecture that is supported, each from its own configuration class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# all experts for every token: which ones are picked jumps, and is not what is tested
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """One model: ``model_type``, what its configuration says beyond the common, and what is expected of its sites."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 2
    full: int = 4
    # the model itself rotates or normalises in float32, whatever its dtype
    rounds: bool = False
    attention: str = "sdpa"


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4} | settings}


FAMILIES = [
    Family("llama", "llama"),
    Family("llama-linear", "llama", _rope(rope_type="linear", factor=2.0)),
    Family("llama-dynamic", "llama", _rope(rope_type="dynamic", factor=2.0)),
    Family("llama-yarn", "llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    Family(
        "llama-llama3",
        "llama",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Family("mistral-sliding", "mistral", {"sliding_window": 24}),
    Family("mistral", "mistral", {"sliding_window": None}),
    Family("qwen2", "qwen2"),
    Family("qwen2-mixed", "qwen2", {"use_sliding_window": True, "sliding_window": 24, "layer_types": _MIXED}, full=2),
    Family("qwen3", "qwen3"),
    Family("gemma", "gemma", kv_heads=1),
    Family(
        "gemma2",
        "gemma2",
        {"layer_types": _MIXED, "sliding_window": 24, "attn_logit_softcapping": 3.0},
        full=2,
        rounds=True,
        attention="eager",
    ),
    Family(
        "gemma3",
        "gemma3_text",
        {"layer_types": _MIXED, "sliding_window": 24, "rope_parameters": _GEMMA_ROPE, "query_pre_attn_scalar": 16},
        kv_heads=1,
        full=2,
    ),
    Family("phi", "phi", _rope(partial_rotary_factor=0.5) | {"hidden_size": 64, "qk_layernorm": True}),
    Family("phi3", "phi3", {"sliding_window": None, "pad_token_id": 0}),
    Family("phi3-partial", "phi3", _rope(rope_type="default", partial_rotary_factor=0.5) | {"pad_token_id": 0}),
    Family("phi3-long", "phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "pad_token_id": 0}),
    Family("olmo2", "olmo2"),
    Family("granite", "granite", {"attention_multiplier": 0.4}),
    Family("granitemoe", "granitemoe", {"attention_multiplier": 0.4, "num_local_experts": 4, "num_experts_per_tok": 4}),
    Family("gpt-neox", "gpt_neox", _rope(rope_type="default", partial_rotary_factor=0.25), kv_heads=4),
    Family("stablelm", "stablelm", _rope(rope_type="default", partial_rotary_factor=0.25) | {"use_qkv_bias": True}),
    Family("stablelm-norm", "stablelm", _rope(rope_type="default", partial_rotary_factor=0.5) | {"qk_layernorm": True}),
    Family("starcoder2", "starcoder2", {"sliding_window": 24}),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": None}),
    Family("qwen2-moe", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 32, "use_sliding_window": False}),
    Family("qwen3-moe", "qwen3_moe", _EXPERTS),
    Family("cohere", "cohere", rounds=True),
    Family("cohere-norm", "cohere", {"use_qk_norm": True}, rounds=True),
    Family("cohere2", "cohere2", {"layer_types": _MIXED, "sliding_window": 24}, full=2, rounds=True),
    Family(
        "gpt-oss",
        "gpt_oss",
        _rope(rope_type="default")
        | {"layer_types": _MIXED, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 4},
        full=2,
        attention="eager",
    ),
]


def make_family(family: Family, seed: int = 0) -> Any:
    """The model in float64: 4 layers, 4 query heads of 16, context 512."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": family.kv_heads,
        "head_dim": 16,
        "vocab_size": 260,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    } | family.settings
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.kind, **settings)
    # grouped products of experts know no float64, sdpa no cap on scores and no sinks, eager softmax float32 only
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=family.attention, experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 1.0)
            elif "norm" in name:
                # not all ones, so that a norm in the wrong place shows
                parameter.add_(torch.rand_like(parameter) * 0.5)
            else:
                parameter.normal_(0, 0.15)
    return model.double().eval()


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request) -> Family:
    return request.param


@pytest.fixture
def family_model(family) -> Any:
    """The model of ``family``."""
    return make_family(family)


@pytest.fixture(scope="session")
def families() -> list[Family]:
    return FAMILIES


@pytest.fixture(scope="session")
def family_named() -> Callable[[str], Any]:
    """The maker of one family's model by the family's name."""
    return lambda name: make_family(next(family for family in FAMILIES if family.name == name))
