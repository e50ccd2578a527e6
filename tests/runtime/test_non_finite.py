"""Keys and values that no cache can hold are refused by layer, token and sequence; the cache is spoilt then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.errors import AatcError
from aatc_cli.evals.distortion.layers import measure_distortion
from aatc_cli.evals.forced.chunked import chunked_logits
from aatc_cli.evals.forced.scores import score_windows
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=2, recent=8, flush=4)
BAD, PAD = 77, 5
DTYPES = ("float32", "bfloat16", "float16")
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return load_model(find_model(str(tiny_llama)), dtype="float32")


@pytest.fixture
def plan(codecs: Any, model: Any) -> list[Any]:
    geometry = geometry_of(model.config)
    return codecs(geometry.layers, geometry.channels, 2, 4)


def ids(length: int, bad: int | None = None, batch: int = 1) -> torch.Tensor:
    """Tokens that are neither `BAD` nor `PAD`, but for the last sequence's token ``bad``."""
    found = 100 + torch.randint(100, (batch, length), generator=torch.Generator().manual_seed(0))
    if bad is not None:
        found[-1, bad] = BAD
    return found


def spoil(model: Any, value: float, token: int = BAD) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = value


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", ["packed", "simulated"])
def test_a_prompt_names_layer_token_and_sequence(model, plan, cache, dtype, value):
    model = model.to(getattr(torch, dtype))
    spoil(model, value)
    with torch.no_grad(), attach_codecs(model, plan, WINDOW, cache) as session:
        cache = session.new_cache()
        with pytest.raises(AatcError, match=r"layer 0 are not finite.* at token 13 of sequence 2") as caught:
            model(ids(30, 13, batch=3), **{session.keyword: cache})
        assert "begin a new cache" in str(caught.value.hint)
        with pytest.raises(AatcError, match="interrupted"):
            model(ids(1, batch=3), **{session.keyword: cache})
        with pytest.raises(AatcError, match="interrupted"):
            model(ids(1, batch=3), **{session.keyword: copy.deepcopy(cache)})
        cache.reset()
        assert torch.isfinite(model(ids(30), **{session.keyword: cache}).logits).all()


@pytest.mark.parametrize("at", [1, 2, 9, 10, 29])
def test_a_step_names_its_token(model, plan, at):
    """In the sinks, in the window, where a block is packed and behind it."""
    spoil(model, NAN)
    tokens = ids(30, at)
    with torch.no_grad(), attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        for t in range(at):
            model(tokens[:, t : t + 1], **{session.keyword: cache})
        with pytest.raises(AatcError, match=rf"layer 0 are not finite.* at token {at} of sequence 0"):
            model(tokens[:, at : at + 1], **{session.keyword: cache})


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("side", ["k_proj", "v_proj"])
def test_weights_name_the_layer(model, plan, layer, side):
    with torch.no_grad():
        getattr(model.model.layers[layer].self_attn, side).weight[3, 3] = NAN
    with torch.no_grad(), attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        with pytest.raises(AatcError, match=rf"layer {layer} are not finite.* at token 0 of sequence 0"):
            model(ids(20), **{session.keyword: cache})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_whose_latents_may_overflow_are_refused(model, plan, dtype):
    """Up to the limit a cache holds them and gives finite numbers back; beyond it they are refused."""
    model = model.to(getattr(torch, dtype))
    heads = model.model.layers[3].self_attn.v_proj
    for size, refused in ((1e30, False), (1e33, True)):
        with torch.no_grad():
            heads.weight.fill_(size / 64)
        with torch.no_grad(), attach_codecs(model, plan, WINDOW) as session:
            cache = session.new_cache()
            if refused:
                with pytest.raises(AatcError, match=r"layer 3 are not finite, or beyond 2e\+31"):
                    model(ids(40), **{session.keyword: cache})
            else:
                model(ids(40), **{session.keyword: cache})
                stream = cache.state.groups[0].stores[3].streams[0]
                assert stream.tokens
                assert torch.isfinite(stream.value_scales).all()


def test_padding_may_be_anything(model, plan):
    """Padding is not stored: what it holds refuses nothing and changes nothing."""
    tokens, mask = ids(24, batch=2), torch.ones(2, 24, dtype=torch.int64)
    tokens[0, :7], mask[0, :7] = PAD, 0
    found = []
    for value in (0.1, NAN):
        spoil(model, value, PAD)
        with torch.no_grad(), attach_codecs(model, plan, WINDOW) as session:
            logits = model(tokens, attention_mask=mask, **{session.keyword: session.new_cache()}).logits
        found.append(logits[mask.bool()])
    assert torch.equal(*found)
    tokens[0, 9] = BAD
    spoil(model, NAN)
    with torch.no_grad(), attach_codecs(model, plan, WINDOW) as session:  # noqa: SIM117
        with pytest.raises(AatcError, match="at token 2 of sequence 0"):
            model(tokens, attention_mask=mask, **{session.keyword: session.new_cache()})


def test_generate_ends_with_the_error(model, plan):
    spoil(model, NAN)
    with attach_codecs(model, plan, WINDOW) as session, pytest.raises(AatcError, match="token 4 of sequence 0"):
        model.generate(ids(12, 4), max_new_tokens=5, do_sample=False, **{session.keyword: session.new_cache()})


def test_evaluations_name_layer_and_token(model, plan):
    spoil(model, INF)
    sites, method = attention_sites(model), Method("paper", plan, WINDOW, "pre-rope")
    windows = torch.stack((ids(40)[0], ids(40, 21)[0]))
    with pytest.raises(AatcError, match="the keys of layer 0 are not finite at token 21"):
        score_windows(model, sites, [method], windows, 8, lambda name: None)
    for logits in (method_logits, chunked_logits):
        with pytest.raises(AatcError, match="the keys of layer 0 are not finite at token 21"):
            logits(model, sites, method, windows[1:], 8)
    with pytest.raises(AatcError, match="the keys of layer 0 are not finite at token 21"):
        measure_distortion(model, sites, plan, WINDOW, windows, [30], lambda: None)
