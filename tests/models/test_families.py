"""Every supported architecture: what is captured, and the compressed cache against the model's own."""

from __future__ import annotations

import torch

from aatc_cli.config import Window
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import ExactLayer, attention_layers, attention_sites, geometry_of
from aatc_cli.models.architectures import ARCHITECTURES
from aatc_cli.models.attention import attention_override, exact_attention
from aatc_cli.models.capture import capture
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=2, recent=8, flush=4)
LENGTH = 44


def tokens_of(length, seed=1, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoded(model, session, ids):
    """Logits of a prompt of 20 tokens and of every later token, fed one by one."""
    cache = session.new_cache()
    rows = [model(ids[:, :20], **{session.keyword: cache}).logits[0]]
    rows += [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0] for t in range(20, ids.shape[1])]
    return torch.cat(rows)


def test_every_architecture_is_tested(families):
    assert {family.kind for family in families} | {"gemma3"} == set(ARCHITECTURES)


@torch.no_grad()
def test_compressed_cache_equals_the_models_own(family, family_model, codecs):
    """At 16 bits in prefill, decode, and a left-padded batch; with few bits, decode equals the evaluator."""
    model = family_model
    geometry = geometry_of(model.config)
    layers = attention_layers(model)
    assert geometry.layers == family.full
    assert sum(isinstance(layer, ExactLayer) for layer in layers) == 4 - family.full == geometry.sliding_layers
    ids = tokens_of(LENGTH)
    own = model(ids).logits[0]
    scale = own.abs().max()
    errors = {}
    for bits in (8, 12, 16):
        with attach_codecs(model, codecs(geometry.layers, geometry.channels, 1, bits), WINDOW) as session:
            prefill = model(ids, **{session.keyword: session.new_cache()}).logits[0]
            decode = decoded(model, session, ids)
            errors[bits] = (decode - own).square().mean().sqrt()
    assert (prefill - own).abs().max() < (1e-6 if family.rounds else 1e-9) * scale
    # what is left is the quantizer's step, a sixteenth over 4 bits; beyond 12 the float16 token scale limits it
    assert errors[12] < errors[8] / 8
    assert 0 < errors[16] < errors[12]
    assert errors[16] < 1e-2 * scale
    with attach_codecs(model, codecs(geometry.layers, geometry.channels, 1, 16), WINDOW) as session:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, :13] = 0
        batch = torch.cat((ids, torch.cat((ids[:, :13] * 0, ids[:, : LENGTH - 13]), 1)))
        padded = session.new_cache()
        wide = [model(batch[:, :20], attention_mask=mask[:, :20], **{session.keyword: padded}).logits]
        for t in range(20, LENGTH):
            wide.append(model(batch[:, t : t + 1], attention_mask=mask[:, : t + 1], **{session.keyword: padded}).logits)
    both = torch.cat(wide, 1)
    assert (both[0] - decode).abs().max() < 1e-6 * scale
    assert (both[1, 13:] - own[: LENGTH - 13]).abs().max() < 1e-2 * scale


@torch.no_grad()
def test_token_by_token_equals_the_evaluator(family, family_model, codecs):
    model = family_model
    geometry = geometry_of(model.config)
    sites = codecs(geometry.layers, geometry.channels, 1, 3)
    ids = tokens_of(LENGTH)
    expected = method_logits(model, attention_sites(model), Method("test", sites, WINDOW, "pre-rope"), ids, 0)
    with attach_codecs(model, sites, WINDOW) as session:
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(LENGTH)]
    scale = expected.abs().max()
    assert (torch.stack(rows)[:-1] - expected).abs().max() < (1e-6 if family.rounds else 1e-9) * scale
    own = model(ids).logits[0, :-1]
    assert (own - expected).abs().max() > 1e-2 * scale


@torch.no_grad()
def test_captured_keys_give_the_models_own(family, family_model):
    """The rows seen, with their bias and the model's rotation, are what its attention is given; values likewise."""
    model = family_model
    geometry = geometry_of(model.config)
    seen, used = {}, {}

    def attend(inputs):
        used[inputs.site.layer] = inputs
        return exact_attention(inputs.site, inputs.query, inputs.key, inputs.value, inputs.scaling)

    sites, ids = attention_sites(model), tokens_of(30)
    with (
        capture(sites, lambda layer, q, k, v: seen.update({layer: (q, k, v)})),
        attention_override(model, sites, attend),
    ):
        logits = model(ids, use_cache=False).logits
    assert (logits - model(ids).logits).abs().max() < (1e-6 if family.rounds else 1e-9) * logits.abs().max()
    for site in sites:
        (q, k, v), inputs = seen[site.layer], used[site.layer]

        def by_head(x, bias=None):
            x = x if bias is None else x + bias
            return x.unflatten(-1, (-1, geometry.head_dim)).transpose(1, 2)

        for rows, bias, got in ((q, None, inputs.query), (k, site.k_bias, inputs.key)):
            torch.testing.assert_close(inputs.rotate(by_head(rows, bias)), got, rtol=1e-6, atol=1e-6)
        assert torch.equal(by_head(v, site.v_bias), inputs.value) or site.v_bias is not None
        torch.testing.assert_close(by_head(v, site.v_bias), inputs.value, rtol=1e-12, atol=1e-12)
        # linear in the input: without the bias a key or value of no input is nothing
        if site.k_bias is not None:
            assert site.k_bias.abs().max() > 0.1
