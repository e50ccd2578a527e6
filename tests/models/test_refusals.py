"""What a compressed cache cannot do is one error that names it, and leaves the model as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from aatc_cli.config import Window
from aatc_cli.errors import AatcError, UnsupportedModelError
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=2, recent=8, flush=4)
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
_MLA = {
    "hidden_size": 32,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_ENCODER = {
    "d_model": 32,
    "vocab_size": 100,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_layers": 2,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 32,
}


@pytest.fixture
def llama(tiny_llama):
    return load_model(find_model(str(tiny_llama))).double()


@pytest.fixture
def ids():
    return torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("maker", "kind", "settings", "says"),
    [
        (AutoModelForCausalLM, "deepseek_v2", _MLA, "multi-head latent attention"),
        (AutoModelForCausalLM, "deepseek_v3", _MLA, "multi-head latent attention"),
        (AutoModelForSeq2SeqLM, "t5", _ENCODER, "encoder-decoder"),
        (AutoModelForSeq2SeqLM, "bart", _ENCODER, "encoder-decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else None,
)
def test_models_with_another_cache_are_refused_by_name(codecs, maker, kind, settings, says):
    model = maker.from_config(AutoConfig.for_model(kind, **settings))
    before = model.config._attn_implementation
    with (
        pytest.raises(UnsupportedModelError, match=f"{kind} is not supported: .*{says}") as caught,
        attach_codecs(model, codecs(2, 32, 2, 3), WINDOW),
    ):
        pass
    assert caught.value.hint.startswith("supported: decoder-only models")
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("compile_", [torch.compile, lambda m: m.compile() or m, lambda m: m.model.compile() or m])
def test_a_compiled_model_is_refused(llama, codecs, compile_):
    model = compile_(llama)
    with pytest.raises(AatcError, match="a compiled model"), attach_codecs(model, codecs(4, 32, 2, 3), WINDOW):
        pass


def test_a_model_on_two_devices_is_refused(llama, codecs):
    llama.lm_head.to("meta")
    with pytest.raises(AatcError, match="spread over cpu, meta"), attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW):
        pass


def test_a_model_in_training_is_refused(llama, codecs):
    """With checkpointing transformers would drop the cache, and with dropout what it holds would be drawn."""
    llama.train()
    llama.gradient_checkpointing_enable()
    with (
        pytest.raises(AatcError, match="in training mode") as caught,
        attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW),
    ):
        pass
    assert "model.eval()" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_a_model_told_to_use_no_cache_is_refused(llama, codecs, name):
    getattr(llama, name).use_cache = False
    says = f"the model's {name} says use_cache: false"
    with pytest.raises(AatcError, match=says), attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW):
        pass


def test_a_model_saved_without_a_cache_is_loaded_with_one(llama, codecs, ids, tiny_llama, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    for file in ("config.json", "generation_config.json"):
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(data | {"use_cache": False}))
    other, sites = load_model(find_model(str(folder))).double(), codecs(4, 32, 2, 3)
    found = []
    for model in (llama, other):
        with attach_codecs(model, sites, WINDOW) as session:
            found.append(model.generate(ids, **GREEDY, **{session.keyword: session.new_cache()}))
    assert torch.equal(*found)


@torch.no_grad()
def test_two_attached_models_do_not_meet_and_one_is_not_attached_twice(llama, tiny_qwen2, codecs, ids):
    other, sites = load_model(find_model(str(tiny_qwen2))).double(), codecs(4, 32, 2, 3)
    with attach_codecs(llama, sites, WINDOW) as session:
        alone = llama(ids, **{session.keyword: session.new_cache()}).logits
        with attach_codecs(other, sites, WINDOW) as second:
            cache = second.new_cache()
            assert torch.equal(llama(ids, **{session.keyword: session.new_cache()}).logits, alone)
            expected = other(ids, **{second.keyword: cache}).logits
            with pytest.raises(AatcError, match="attached to a compr"), attach_codecs(other, sites, WINDOW):
                pass
            assert torch.equal(other(ids, **{second.keyword: second.new_cache()}).logits, expected)
        # the inner block is over, the outer one goes on
        assert torch.equal(llama(ids, **{session.keyword: session.new_cache()}).logits, alone)


@pytest.mark.parametrize(("name", "found"), [("static", "StaticCache"), ("offloaded", "DynamicCache")])
def test_caches_of_transformers_are_refused(llama, codecs, ids, name, found):
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        with pytest.raises(AatcError, match=f"needs a compressed cache, got a {found}"):
            llama.generate(ids, cache_implementation=name, **GREEDY)
        # with both of them transformers itself objects, before any of this package runs
        with pytest.raises(ValueError, match="cache_implementation"):
            llama.generate(ids, cache_implementation=name, **GREEDY, **{session.keyword: session.new_cache()})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not supported"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2 would run 2 of 4 layers"),
    ],
    ids=["use_cache", "output_attentions", "early-exit"],
)
def test_options_that_go_around_the_cache_are_refused(llama, codecs, ids, options, says):
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        expected = llama.generate(ids, **GREEDY, **{session.keyword: session.new_cache()})
        with pytest.raises(AatcError, match=says):
            llama.generate(ids, **GREEDY, **options, **{session.keyword: session.new_cache()})
        assert llama.config.num_hidden_layers == 4
        assert torch.equal(llama.generate(ids, **GREEDY, **{session.keyword: session.new_cache()}), expected)


@torch.no_grad()
def test_another_attention_inside_the_block_is_refused(llama, codecs, ids):
    """It would see the new tokens alone and say nothing."""
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        ours = llama.config._attn_implementation
        llama.set_attn_implementation("eager")
        with pytest.raises(AatcError, match="'eager' inside the block"):
            llama(ids, **{session.keyword: session.new_cache()})
        llama.config._attn_implementation = ours
        llama(ids, **{session.keyword: session.new_cache()})


@torch.no_grad()
def test_an_empty_prompt_is_refused(llama, codecs, ids):
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        cache = session.new_cache()
        for call in (
            lambda: llama(ids[:, :0], **{session.keyword: cache}),
            lambda: llama(input_ids=ids[:, :0], **{session.keyword: cache}),
            lambda: llama.generate(ids[:, :0], **GREEDY, **{session.keyword: cache}),
        ):
            with pytest.raises(AatcError, match="the prompt is empty"):
                call()
        # and it left the cache as good as new
        got, cold = (llama(ids, **{session.keyword: c}).logits for c in (cache, session.new_cache()))
        assert torch.equal(got, cold)
        # a prompt of which the cache holds more than there is goes on from nowhere
        with pytest.raises(AatcError, match=r"its cache ends at 19|attention mask is of shape"):
            llama.generate(ids[:, :15], **GREEDY, **{session.keyword: cache})
