"""Profiles against transformers' own configuration classes, and the wrapper that larger Gemma 3 models come in."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig

from aatc_cli.config import Window
from aatc_cli.models.adapter import ExactLayer, attention_layers, geometry_of
from aatc_cli.profiles import available, load_model_profile
from aatc_cli.runtime.attach import attach_codecs

GEMMA = dict(zip(("270m", "1b", "4b", "12b", "27b"), (18, 26, 34, 48, 62), strict=True))


@pytest.mark.parametrize("size", GEMMA)
def test_gemma_3_layers_lie_as_transformers_lays_them(size):
    expected = load_model_profile(f"gemma-3-{size}-it").geometry
    config = Gemma3TextConfig(
        num_hidden_layers=GEMMA[size],
        hidden_size=expected.hidden_size,
        num_attention_heads=expected.heads,
        num_key_value_heads=expected.kv_heads,
        head_dim=expected.head_dim,
        sliding_window=expected.sliding_window,
    )
    assert geometry_of(config) == expected


@pytest.mark.parametrize("name", available("models"))
def test_head_groups_are_the_fewest_of_at_most_512_channels(name):
    profile = load_model_profile(name)
    g = profile.geometry
    fitting = [n for n in range(1, g.kv_heads + 1) if g.kv_heads % n == 0 and g.channels // n <= 512]
    assert profile.head_groups == fitting[0]


@torch.no_grad()
def test_gemma_3_with_its_vision_tower(codecs):
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "vocab_size": 260,
        "max_position_embeddings": 512,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    layers = attention_layers(model)
    assert [isinstance(layer, ExactLayer) for layer in layers] == [True, False]
    assert all("language_model" in layer.name for layer in layers)
    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    own = model(input_ids=ids).logits
    with attach_codecs(model, codecs(1, 16, 1, 16), Window(sinks=2, recent=8, flush=4)) as session:
        cache = session.new_cache()
        rows = [model(input_ids=ids[:, t : t + 1], **{session.keyword: cache}).logits for t in range(40)]
    assert 0 < (torch.cat(rows, 1) - own).abs().max() < 1e-2 * own.abs().max()
