"""Codecs from end to end: what comes back, how its error falls with bits, and how it splits by groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aatc_cli.core import lloyd
from aatc_cli.core.codec import CastCodec, TransformCodec
from aatc_cli.core.quantizer import code_range
from aatc_cli.core.transform import group_moments, whitening
from aatc_cli.core.weights import channel_scales, latent_variance
from aatc_cli.errors import AatcError

CHANNELS = 24


def rows(tokens: int = 4000, seed: int = 0) -> torch.Tensor:
    """Correlated rows with a mean; the mixing does not depend on the seed, so seeds give fresh data of one source."""
    mixing = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(100), dtype=torch.float64)
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, CHANNELS, generator=gen, dtype=torch.float64) @ mixing + mixing[0]


def codec(width: int, groups: int = 1) -> TransformCodec:
    x = rows()
    moment = x.T @ x / x.shape[0]
    parts = [whitening(block) for block in group_moments(moment, groups)]
    encode, decode = torch.stack([p.encode for p in parts]), torch.stack([p.decode for p in parts])
    variance = latent_variance(encode, moment)
    bits = torch.full((CHANNELS,), width)
    return TransformCodec(encode, decode, channel_scales(encode, x, variance), bits, variance)


def relative_error(x: torch.Tensor, back: torch.Tensor) -> float:
    return float((x - back).square().mean() / x.square().mean())


@pytest.mark.parametrize("groups", [1, 3])
def test_error_falls_by_four_with_every_bit(groups):
    """The step halves, so squared error is a quarter; on fresh rows, of vectors and of latents."""
    x, made = rows(seed=1), codec(4, groups)
    assert made.groups == groups
    of_vectors, of_latents = [], []
    for width in range(4, 11):
        sized = made.with_bits(torch.full((CHANNELS,), width))
        back = sized.reconstruct(x)
        of_vectors.append(relative_error(x, back))
        of_latents.append(relative_error(sized.latents(x), sized.latents(back)))
    for errors in (of_vectors, of_latents):
        ratios = np.array(errors[:-1]) / np.array(errors[1:])
        assert (ratios > 3.7).all(), ratios
        assert (ratios < 4.5).all(), ratios
    # four bits over a range of about +-2.5 deviations: step^2 / 12 is 8e-3 of the variance
    assert 2e-3 < of_latents[0] < 2e-2


def test_sixteen_bits_are_as_good_as_float16():
    x = rows(seed=2)
    assert 1e-12 < relative_error(x, codec(16).reconstruct(x)) < 1e-7


def test_without_bits_nothing_comes_back():
    x = rows(seed=3)
    assert not codec(0).reconstruct(x).any()
    assert relative_error(x, torch.zeros_like(x)) == 1.0
    assert relative_error(x, codec(4).reconstruct(x)) < 0.03
    made = codec(4)
    mismatched = replace(made, decode=made.decode.flip(1))
    assert relative_error(x, mismatched.reconstruct(x)) > 0.5


@pytest.mark.parametrize("width", [6, 8])
def test_modelled_noise_is_the_measured_one(width):
    """But for the channel that sets alpha: no error when it is negative, a whole step (12 times the model) when not."""
    made, x = codec(width), rows(20_000, seed=4)
    made = made.with_bits(torch.where(torch.arange(CHANNELS) < CHANNELS - 2, made.bits, 0))
    noise = made.noise(x)
    assert noise.shape == x.shape
    h = made.latents(x)
    measured = (made.latents(made.reconstruct(x)) - h).square().mean(0) / noise.mean(0)
    ratios = (h / made.scale)[:, :-2]
    loudest = ratios.abs() == ratios.abs().amax(1, keepdim=True)
    factor = torch.where(loudest, torch.where(ratios > 0, 12.0, 0.0), 1.0)
    expected = (factor * noise[:, :-2]).mean(0) / noise[:, :-2].mean(0)
    np.testing.assert_allclose(measured[:-2].numpy(), expected.numpy(), rtol=0.06)
    assert measured[:-2].mean().item() == pytest.approx(1 + (12 / 2 - 1) / 22, rel=0.03)
    # dropped channels: the variance of the calibration rows, here measured on others of the same source
    np.testing.assert_allclose(measured[-2:].numpy(), 1.0, atol=0.06)


def test_groups_do_not_disturb_each_other():
    made, x = codec(3, groups=3), rows(seed=5)
    louder = x.clone()
    louder[:, 8:16] *= 1000
    before, after = made.reconstruct(x), made.reconstruct(louder)
    assert torch.equal(before[:, :8], after[:, :8])
    assert torch.equal(before[:, 16:], after[:, 16:])
    assert not torch.equal(before[:, 8:16], after[:, 8:16])
    joint = codec(3)
    assert relative_error(joint.reconstruct(x)[:, :8], joint.reconstruct(louder)[:, :8]) > 0.5


def test_any_leading_shape_and_dtype():
    made, x = codec(5).to("cpu"), rows(60, seed=6).to(torch.float32)
    assert {made.encode.dtype, made.decode.dtype, made.scale.dtype, made.variance.dtype} == {torch.float32}
    flat, shaped = made.reconstruct(x), made.reconstruct(x.reshape(3, 4, 5, CHANNELS))
    torch.testing.assert_close(shaped.reshape(60, CHANNELS), flat, rtol=0, atol=1e-5 * float(x.abs().max()))
    assert made.reconstruct(x.to(torch.bfloat16)).dtype == torch.bfloat16
    double = codec(5).reconstruct(x.to(torch.float64))
    # rounding of the encode may move a code across a boundary, which is as good a code
    assert relative_error(double, flat.to(torch.float64)) < 1e-5
    assert torch.equal(made.with_bits(made.bits * 0).bits, torch.zeros(CHANNELS, dtype=torch.int64))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("quantizer", ["uniform-token-max", "uniform"])
def test_units_say_what_codes_stand_for(quantizer, groups):
    """alpha unit (u - offset) is what dequantize gives, for any codes of any widths."""
    bits = torch.tensor([*range(17), 0, 1, 2, 3, 4, 8, 16])
    made = replace(codec(4, groups), bits=bits, quantizer=quantizer)
    generator = torch.Generator().manual_seed(8)
    low, high = code_range(bits)
    share = torch.rand(200, CHANNELS, generator=generator, dtype=torch.float64)
    codes = (low + torch.floor(share * (high - low + 1))).to(torch.int32)
    assert (codes.min(0).values == low)[1:5].all()
    assert (codes.max(0).values == high)[1:5].all()
    alpha = torch.exp2(2 * torch.randn(200, groups, generator=generator)).to(torch.float16)
    unit, offset = made.units()
    places = codes + torch.where(bits > 0, 2 ** (bits - 1).clamp_min(0), 0)
    assert (places >= 0).all()
    assert (places < 2**bits).all()
    found = alpha.double().repeat_interleave(CHANNELS // groups, -1) * unit * (places - offset)
    torch.testing.assert_close(found, made.dequantize(codes, alpha), rtol=1e-12, atol=0)
    assert unit[bits == 0].tolist() == offset[bits == 0].tolist() == [0.0, 0.0]
    middle = 2.0**bits / 2 - (0.5 if quantizer == "uniform" else 0.0)
    assert torch.equal(offset, torch.where(bits > 0, middle, 0.0).double())


@pytest.mark.parametrize("quantizer", ["lloyd", "uniform", "uniform-token-max"])
def test_about_a_centre_it_is_the_codec_of_what_is_left(quantizer):
    """Vectors less their mean, coded and the mean added again; what has no bits is read as the mean."""
    x, mean = rows(seed=3), rows().mean(0)
    plain = replace(codec(3, 3), quantizer=quantizer, bits=torch.arange(CHANNELS) % 4)
    centred = replace(plain, centre=plain.latents(mean))
    expected = plain.reconstruct(x - mean) + mean
    assert (centred.reconstruct(x) - expected).abs().max() < 1e-9
    none = centred.with_bits(torch.zeros(CHANNELS, dtype=torch.int64))
    assert (none.reconstruct(x) - mean).abs().max() < 1e-9
    with pytest.raises(AatcError, match="about a mean"):
        centred.units()


def test_lloyd_levels_have_no_unit():
    with pytest.raises(AatcError, match="not evenly spaced"):
        replace(codec(4), quantizer="lloyd").units()


def test_modelled_noise_of_uniform_levels_is_the_measured_one():
    """A normal's quantiles as latents, the scale fixed; wider codes have their error beyond the last quantile."""
    bits = torch.tensor([0, 1, 2, 3, 4, 5] * 4)
    made = replace(codec(4), bits=bits, quantizer="uniform")
    count = 100_000
    h = torch.special.ndtri((torch.arange(count).double() + 0.5) / count)[:, None] * made.variance.sqrt()
    alpha = torch.ones(count, 1, dtype=torch.float16)
    index = made._tables.nearest(h / made.variance.sqrt())
    back = made.dequantize((index - made._tables.half).to(torch.int32), alpha)
    noise = lloyd.noise_variance(alpha, made.variance.sqrt(), bits, uniform=True)
    np.testing.assert_allclose((back - h).square().mean(0).numpy(), noise[0].numpy(), rtol=0.003)


def test_cast_codec_rounds_like_numpy():
    x = rows(50).to(torch.float32)
    back = CastCodec().reconstruct(x)
    np.testing.assert_array_equal(back.numpy(), x.numpy().astype(np.float16).astype(np.float32))
    assert 1e-5 < ((back - x).abs() / x.abs()).max() <= 2.0**-11
    coarse = CastCodec(torch.bfloat16).reconstruct(x)
    assert 1e-3 < ((coarse - x).abs() / x.abs()).max() <= 2.0**-8
    assert torch.equal(CastCodec(torch.float32).reconstruct(x), x)
