"""Capture sees queries, keys and values before RoPE, without bias, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.errors import UnsupportedModelError
from aatc_cli.models.adapter import attention_sites, geometry_of, non_finite
from aatc_cli.models.capture import capture
from aatc_cli.models.loading import find_model, load_config, load_model


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_capture_equals_the_projections_of_the_layer_input(request, name):
    model = load_model(find_model(str(request.getfixturevalue(name))))
    sites, seen, inputs = attention_sites(model), {}, {}
    handles = [
        site.module.register_forward_pre_hook(
            lambda module, args, kwargs, layer=site.layer: inputs.update({layer: kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for site in sites
    ]
    with torch.no_grad(), capture(sites, lambda layer, q, k, v: seen.update({layer: (q, k, v)})):
        model(input_ids=torch.arange(20)[None])
    for handle in handles:
        handle.remove()
    assert sorted(seen) == [0, 1, 2, 3]
    for site in sites:
        x, (q, k, v) = inputs[site.layer], seen[site.layer]
        module = site.module
        q_expected, k_expected = module.q_proj(x), x @ module.k_proj.weight.T
        if name == "tiny_qwen3":
            q_expected = module.q_norm(q_expected.view(1, 20, 4, 16)).flatten(2)
            k_expected = module.k_norm(k_expected.view(1, 20, 2, 16)).flatten(2)
        torch.testing.assert_close(q, q_expected)
        torch.testing.assert_close(k, k_expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(v, x @ module.v_proj.weight.T, rtol=1e-4, atol=1e-5)
        if name == "tiny_qwen2":
            assert module.k_proj.bias.abs().max() > 0.5  # the bias is there to be removed
        assert not any(part.module._forward_hooks for part in (site.q, site.k, site.v))


def test_geometry_comes_from_the_configuration(tiny_llama):
    geometry = geometry_of(load_config(find_model(str(tiny_llama))))
    assert (geometry.layers, geometry.heads, geometry.kv_heads, geometry.head_dim) == (4, 4, 2, 16)
    assert geometry.channels == 32


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt2", "gpt2 is not supported"), ("deepseek_v3", "MLA"), ("t5", "encoder-decoder"), ("bloom", "bloom")],
)
def test_other_attentions_are_refused_by_name(family, reason):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    maker = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(AutoConfig.for_model(family, num_hidden_layers=2))
    with pytest.raises(UnsupportedModelError, match=reason):
        attention_sites(model)


def test_first_non_finite_token_is_named():
    x = torch.zeros(2, 5, 3)
    assert non_finite(x) is None
    x[1, 3, 2] = float("inf")
    x[1, 4, 0] = float("nan")
    assert non_finite(x) == (1, 3)
