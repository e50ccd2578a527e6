"""The one-pass evaluator against a cache that is really filled token by token, and against the plain model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import CastCodec, TransformCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, check_finite, make_tile, method_logits
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.loading import find_model, load_model


@pytest.fixture(params=["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def model(request):
    # float64: in float32 a code on a rounding tie may fall either way, which is a step and not rounding
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def random_codecs(geometry_layers: int, channels: int, groups: int, bits: int, seed: int = 0):
    """Codecs with a random invertible transform per site, so that a wrong basis or order would show."""
    generator = torch.Generator().manual_seed(seed)
    codecs = []
    for _ in range(geometry_layers):
        sites = {}
        for side in SIDES:
            size = channels // groups
            encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64)
            encode = encode + 3 * torch.eye(size, dtype=torch.float64)
            sites[side] = TransformCodec(
                encode=encode,
                decode=torch.linalg.inv(encode),
                bits=torch.full((channels,), bits),
                scale=torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5,
                variance=torch.ones(channels, dtype=torch.float64),
            ).to("cpu", torch.float64)
        codecs.append(sites)
    return codecs


def tokens_of(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_token_by_token(feed, model, method: Method, tokens: torch.Tensor) -> torch.Tensor:
    """Independent oracle: feed one token at a time and keep, per layer, the literal sinks, window and packed part."""
    sites = attention_sites(model)
    kept = defaultdict(lambda: {"keys": [], "values": [], "raw": [], "packed": 0})

    def attend(inputs):
        layer = kept[inputs.site.layer]
        layer["keys"].append(inputs.key)
        layer["values"].append(inputs.value)
        layer["raw"].append((inputs.k_raw, inputs.v_raw, inputs.cos, inputs.sin))
        window, count = method.window, len(layer["keys"])
        # the rule in words: while more than w recent tokens are left, the f oldest of them are packed
        while count - window.sinks - layer["packed"] > window.recent:
            for index in range(window.sinks + layer["packed"], window.sinks + layer["packed"] + window.flush):
                k_raw, v_raw, cos, sin = layer["raw"][index]
                heads, dim = inputs.key.shape[1], inputs.key.shape[3]
                codec = method.codecs[inputs.site.layer]
                k_hat = rebias(codec["k"].reconstruct(k_raw), inputs.site.k_bias)
                v_hat = rebias(codec["v"].reconstruct(v_raw), inputs.site.v_bias)
                layer["keys"][index] = apply_rope(k_hat.view(1, 1, heads, dim).transpose(1, 2), cos, sin)
                layer["values"][index] = v_hat.view(1, 1, heads, dim).transpose(1, 2)
            layer["packed"] += window.flush
        share = inputs.query.shape[1] // inputs.key.shape[1]
        keys = torch.cat(layer["keys"], 2).repeat_interleave(share, 1)
        values = torch.cat(layer["values"], 2).repeat_interleave(share, 1)
        scores = (inputs.query @ keys.transpose(2, 3)) * inputs.scaling
        return scores.softmax(-1) @ values

    return feed(model, sites, attend, tokens)


@pytest.mark.parametrize(
    ("window", "length"),
    [
        pytest.param(Window(sinks=2, recent=8, flush=4), 47, id="s2-w8-f4-T47"),
        pytest.param(Window(sinks=0, recent=1, flush=1), 20, id="s0-w1-f1-T20"),
        pytest.param(Window(sinks=5, recent=16, flush=16), 64, id="s5-w16-f16-T64"),
        pytest.param(Window(sinks=4, recent=128, flush=16), 300, id="paper-window-T300"),
        pytest.param(Window(sinks=40, recent=8, flush=8), 30, id="shorter-than-sinks"),
    ],
)
def test_one_pass_equals_token_by_token(model, fed_one_by_one, window, length):
    method = Method("test", random_codecs(4, 32, 2, bits=3), window, "pre-rope")
    tokens = tokens_of(length)
    expected = decode_token_by_token(fed_one_by_one, model, method, tokens)[:-1]
    got = method_logits(model, attention_sites(model), method, tokens, 0)
    assert got.shape == expected.shape
    scale = expected.abs().max()
    assert (got - expected).abs().max() < 1e-12 * scale
    plain = scored_logits(model, tokens, 0)
    if length > window.sinks + window.recent + window.flush:
        # three bits in a random basis must be visible, or nothing was compressed
        assert (got - plain).abs().max() > 1e-2 * scale
    else:
        assert (got - plain).abs().max() < 1e-12 * scale


def test_sixteen_bits_give_the_model_itself(model):
    method = Method("wide", random_codecs(4, 32, 1, bits=16), Window(sinks=1, recent=4, flush=2), "pre-rope")
    tokens = tokens_of(80)
    got, plain = method_logits(model, attention_sites(model), method, tokens, 10), scored_logits(model, tokens, 10)
    assert (got - plain).abs().max() < 5e-3 * plain.abs().max()
    assert (got - plain).abs().max() > 0


def test_float16_cache_is_nearly_exact_and_not_exactly(model):
    codecs = [dict.fromkeys(SIDES, CastCodec(torch.float16))] * 4
    method = Method("fp16", codecs, Window(sinks=0, recent=1, flush=1), "pre-rope")
    tokens = tokens_of(64)
    difference = (
        method_logits(model, attention_sites(model), method, tokens, 0) - scored_logits(model, tokens, 0)
    ).abs()
    assert 0 < difference.max() < 2e-2


def test_sliding_window_layers_never_look_back_further(tmp_path, new_model):
    folder = new_model(tmp_path / "sliding", family="mistral", sliding_window=24)
    model = load_model(find_model(str(folder))).double()
    sites = attention_sites(model)
    assert {site.sliding_window for site in sites} == {24}
    exact = Method("exact", random_codecs(4, 32, 1, bits=16), Window(sinks=2, recent=8, flush=4), "pre-rope")
    tokens = tokens_of(90)
    plain = scored_logits(model, tokens, 0)
    assert (method_logits(model, sites, exact, tokens, 0) - plain).abs().max() < 1e-2 * plain.abs().max()
    # with the window wider than sliding_window nothing packed is ever in sight: low bits change nothing
    hidden = Method("hidden", random_codecs(4, 32, 1, bits=1), Window(sinks=0, recent=32, flush=4), "pre-rope")
    torch.testing.assert_close(method_logits(model, sites, hidden, tokens, 0), plain)


def test_override_leaves_no_trace_even_after_an_error(model):
    from transformers import AttentionInterface

    sites, before = attention_sites(model), model.config._attn_implementation
    names = set(AttentionInterface()._global_mapping)

    def broken(inputs):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"), attention_override(model, sites, broken):
        model(input_ids=tokens_of(8))
    assert model.config._attn_implementation == before
    assert set(AttentionInterface()._global_mapping) == names
    assert not any(
        site.k.module._forward_hooks or site.v.module._forward_hooks or site.module._forward_pre_hooks for site in sites
    )


def test_a_foreign_rotation_is_refused(tiny_llama):
    model = load_model(find_model(str(tiny_llama))).double()
    method = Method("test", random_codecs(4, 32, 1, bits=4), Window(sinks=2, recent=8, flush=4), "pre-rope")
    # an interleaved rotation, as some families use
    sites = [replace(site, rope="interleaved") for site in attention_sites(model)]
    with pytest.raises(AatcError, match=r"not the one known of its architecture \(interleaved\)"):
        method_logits(model, sites, method, tokens_of(32), 0)


def test_the_place_of_a_bad_logit_is_named():
    logits = torch.zeros(5, 3)
    logits[3, 1] = float("nan")
    with pytest.raises(AatcError, match=r"paper-2: .* window 7, scored position 3"):
        check_finite(logits, "paper-2", 7)


@pytest.mark.parametrize(("sinks", "recent"), [(300, 300), (256, 512), (520, 257), (4, 128)])
def test_tiles_of_queries_fit_the_tensors_they_are_cut_from(sinks, recent):
    """More sinks than a tile has queries: what is read is as wide as the mask, and every token is seen once."""
    window, length = Window(sinks=sinks, recent=recent, flush=16), 1000
    whole = torch.arange(length)
    for start in range(0, length, 256):
        end = min(start + 256, length)
        tile = make_tile(window, start, end, None, torch.device("cpu"))
        places = torch.cat((whole[: tile.sinks], whole[tile.far], whole[tile.near]))
        assert tile.allowed.shape == (end - start, places.numel())
        for row, query in enumerate(range(start, end)):
            assert sorted(places[tile.allowed[row]].tolist()) == list(range(query + 1))
