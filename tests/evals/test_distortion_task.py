"""The distortion task on a tiny model: prediction against a Monte-Carlo of white latent noise, and measurement."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.transform import decode
from aatc_cli.evals.distortion import layers as distortion
from aatc_cli.evals.distortion.layers import measure_distortion
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.loading import find_model, load_model

WINDOW = Window(sinks=2, recent=8, flush=4)
LENGTH, POSITION = 60, 57


@pytest.fixture(scope="module")
def model(tiny_qwen2):
    loaded = load_model(find_model(str(tiny_qwen2))).double()
    with torch.no_grad():
        for site in attention_sites(loaded):
            # heads 0 and 1 share a kv head; writing the same way into the output makes their errors add up
            site.o.weight[:, 16:32] = site.o.weight[:, :16]
    return loaded


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def codec(groups: int = 2, bits: int = 6) -> TransformCodec:
    generator = torch.Generator().manual_seed(5)
    encode = torch.linalg.qr(
        torch.randn(groups, 32 // groups, 32 // groups, generator=generator, dtype=torch.float64)
    ).Q
    ones = torch.ones(32, dtype=torch.float64)
    return TransformCodec(encode, encode.transpose(1, 2), ones, torch.full((32,), bits), ones)


def layer_inputs(model, tokens, layer: int):
    """What attention gets in one layer of the exact model."""
    caught = {}

    def attend(inputs):
        caught[inputs.site.layer] = inputs
        return distortion.mixed_attention(inputs, inputs.key, inputs.value, WINDOW)

    with attention_override(model, attention_sites(model), attend):
        scored_logits(model, tokens, LENGTH - 2)
    return caught[layer]


def attention_output(inputs, keys, values) -> torch.Tensor:
    """Independent: output [M] of one query position, all heads through W_O."""
    share = inputs.query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    query = inputs.query[:, :, POSITION : POSITION + 1]
    count = POSITION + 1
    weights = (query @ keys[:, :, :count].transpose(2, 3) * inputs.scaling).softmax(-1)
    heads = (weights @ values[:, :, :count])[0, :, 0].flatten()
    return heads @ inputs.site.o.weight.double().T


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_prediction_matches_monte_carlo_of_white_latent_noise(model, tokens, side):
    inputs, coder = layer_inputs(model, tokens, 2), codec()
    heads = inputs.query.shape[1]
    rows = inputs.site.o.weight.double().T.reshape(heads, 16, -1)
    keys, values = inputs.key.double()[0].repeat_interleave(2, 0), inputs.value.double()[0].repeat_interleave(2, 0)
    steps = [distortion._step(inputs, keys, torch.einsum("jtd,jdm->jtm", values, rows), WINDOW, POSITION)]
    basis = distortion._head_basis(coder, 2, 16).repeat_interleave(2, 0)
    sigma = 1e-3
    generator = torch.Generator().manual_seed(11)
    spread = sigma * (0.5 + torch.rand(POSITION + 1, 32, generator=generator, dtype=torch.float64))
    spread *= steps[0].packed[:, None]
    predict = (
        distortion._key_predictor(inputs, steps, basis)
        if side == "k"
        else distortion._value_predictor(steps, basis, rows)
    )
    coupled, diagonal = (float(x) for x in predict(0, spread.square()))
    exact = attention_output(inputs, inputs.key, inputs.value)
    errors = []
    for _ in range(1500):
        noise = torch.zeros(LENGTH, 32, dtype=torch.float64)
        noise[: POSITION + 1] = spread * torch.randn(POSITION + 1, 32, generator=generator, dtype=torch.float64)
        delta = decode(noise, coder.decode).reshape(1, LENGTH, 2, 16).transpose(1, 2)
        if side == "k":
            noisy = attention_output(inputs, inputs.key + apply_rope(delta, inputs.cos, inputs.sin), inputs.value)
        else:
            noisy = attention_output(inputs, inputs.key, inputs.value + delta)
        errors.append(float((noisy - exact).square().sum()))
    sample = torch.tensor(errors, dtype=torch.float64)
    stderr = float(sample.std() / len(errors) ** 0.5)
    assert stderr < 0.05 * coupled
    assert abs(float(sample.mean()) - coupled) < 4 * stderr + 1e-3 * coupled
    # heads that share a cache are not independent; if the two agreed, this test could not tell them apart
    assert abs(diagonal - coupled) > 0.01 * coupled


def test_rows_cover_layers_sides_and_widths_and_fall_with_bits(model, tokens):
    codecs = [dict.fromkeys(SIDES, codec(bits=5))] * 4
    steps = []
    rows = measure_distortion(
        model, attention_sites(model), codecs, WINDOW, tokens, [30, 40, 50, 57], lambda: steps.append(1)
    )
    assert len(rows) == 4 * 2 * (1 + len(distortion.UNIFORM_WIDTHS))
    assert len(steps) == 4
    for layer in range(4):
        for side in SIDES:
            picked = {row.bits: row for row in rows if (row.layer, row.side, row.plan) == (layer, side, False)}
            measured = [picked[float(b)].measured for b in (2, 4, 6, 8)]
            assert measured == sorted(measured, reverse=True)
            # two more bits are a sixteenth of the noise power
            assert 8 < picked[6.0].measured / picked[8.0].measured < 32
            assert 8 < picked[6.0].predicted / picked[8.0].predicted < 32
            plan = next(row for row in rows if (row.layer, row.side, row.plan) == (layer, side, True))
            assert plan.bits == 5.0
            assert picked[6.0].measured < plan.measured < picked[4.0].measured


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_measured_error_is_that_of_the_reconstructed_cache(model, tokens, side):
    coder = codec()
    rows = measure_distortion(
        model, attention_sites(model), [dict.fromkeys(SIDES, coder)] * 4, WINDOW, tokens, [POSITION], lambda: None
    )
    inputs = layer_inputs(model, tokens, 1)
    packed = slice(2, 2 + 48)  # 58 tokens, 2 sinks, at most 8 recent, blocks of 4
    narrow = coder.with_bits(torch.full((32,), 4))
    keys, values = inputs.key.clone(), inputs.value.clone()
    if side == "k":
        k_hat = narrow.reconstruct(inputs.k_raw) + inputs.site.k_bias
        turned = apply_rope(k_hat.view(1, LENGTH, 2, 16).transpose(1, 2), inputs.cos, inputs.sin)
        keys[:, :, packed] = turned[:, :, packed]
    else:
        v_hat = (narrow.reconstruct(inputs.v_raw) + inputs.site.v_bias).view(1, LENGTH, 2, 16).transpose(1, 2)
        values[:, :, packed] = v_hat[:, :, packed]
    exact = attention_output(inputs, inputs.key, inputs.value)
    error = (attention_output(inputs, keys, values) - exact).square().sum() / exact.square().sum()
    row = next(row for row in rows if (row.layer, row.side, row.bits, row.plan) == (1, side, 4.0, False))
    assert row.measured == pytest.approx(float(error), rel=1e-9)
    assert row.measured > 0


def test_nothing_packed_is_no_error(model, tokens):
    codecs = [dict.fromkeys(SIDES, codec(bits=1))] * 4
    rows = measure_distortion(
        model, attention_sites(model), codecs, Window(sinks=4, recent=128, flush=16), tokens, [57], lambda: None
    )
    assert all(row.measured == 0 and row.predicted == 0 for row in rows)
