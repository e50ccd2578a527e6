"""Limits of a model are named with both numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from aatc_cli.errors import AatcError
from aatc_cli.models.layer_kinds import layer_windows
from aatc_cli.models.limits import check_length, check_tokens, context_limit
from aatc_cli.models.loading import find_model, load_config


def test_limits_are_named(tiny_llama):
    config = load_config(find_model(str(tiny_llama)))
    with pytest.raises(AatcError, match=r"600 tokens .* context of 512"):
        check_length(600, config)
    check_length(512, config)
    with pytest.raises(AatcError, match=r"token 260, .* 260 tokens only"):
        check_tokens(torch.tensor([[1, 260]]), config)
    check_tokens(torch.tensor([[1, 259]]), config)


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}


@pytest.mark.parametrize(
    ("kind", "published", "limit"),
    [
        # as Qwen2.5 and Qwen3 tell users to change config.json for long texts
        ("qwen2", (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
        ("qwen3", (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
        ("qwen3", (40960, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}), 65536),
        ("qwen3", (40960, None), 40960),
        # YaRN with the long context written down as well: Yarn-Llama-2-7b-128k, gpt-oss
        ("llama", (131072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}), 131072),
        ("llama", (32768, {"rope_type": "yarn", "factor": 4.0}), 131072),
        # Llama 3.1 8B and 3.2 1B
        ("llama", (131072, _LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}), 131072),
        ("llama", (131072, _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}), 131072),
        # vicuna-7b-v1.5-16k
        ("llama", (4096, {"type": "linear", "factor": 4.0}), 16384),
        ("gemma3_text", (131072, {"rope_type": "linear", "factor": 8.0}), 131072),
        ("llama", (4096, {"type": "dynamic", "factor": 2.0}), 4096),
        # Phi-3-mini-128k, whose original context stands beside the scaling
        ("phi3", (131072, _LONG), 131072),
    ],
)
def test_the_context_of_published_scalings(kind, published, limit):
    length, scaling = published
    extra = {"original_max_position_embeddings": 4096} if kind == "phi3" else {}
    config = AutoConfig.for_model(kind, max_position_embeddings=length, rope_scaling=scaling, **extra)
    assert context_limit(config) == limit
    check_length(limit, config)
    with pytest.raises(AatcError, match=f"{limit + 1} tokens are more than the model's context of {limit}"):
        check_length(limit + 1, config)


def test_a_window_beyond_the_original_context_slides_under_yarn(new_model, tmp_path):
    """A window of 300 tokens is never reached in a context of 256, but it is when that is stretched to 1024."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    changes = {"family": "mistral", "sliding_window": 300, "max_position_embeddings": 256}
    long = load_config(find_model(str(new_model(tmp_path / "long", rope_parameters=rope, **changes))))
    short = load_config(find_model(str(new_model(tmp_path / "short", **changes))))
    assert {window.tokens for window in layer_windows(long)} == {300}
    assert {window.tokens for window in layer_windows(short)} == {None}
