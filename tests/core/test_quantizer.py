"""The scalar quantizer against the paper's formulas in exact rational arithmetic, one number at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from aatc_cli.core.quantizer import code_range, dequantize, noise_variance, quantize, steps, token_scale

ALL_WIDTHS = torch.arange(17)
DTYPES = [torch.float64, torch.float32]
HALF = Fraction(1, 2)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact_step(alpha: float, scale: float, bits: int) -> Fraction:
    """Delta = 2 alpha s / 2^b."""
    return 2 * Fraction(alpha) * Fraction(scale) / 2**bits


def exact_code(h: float, step: Fraction, bits: int) -> tuple[int, Fraction]:
    """clamp(floor(h / Delta + 1/2), -2^(b-1), 2^(b-1) - 1), and how far h / Delta + 1/2 is from the next integer."""
    if bits == 0 or step == 0:
        return 0, HALF
    place = Fraction(h) / step + HALF
    code = math.floor(place)
    distance = min(place - code, code + 1 - place)
    return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, code)), distance


def random_case(seed: int, dtype: torch.dtype, tokens: int = 40, groups: int = 2):
    """Latents of very different tokens, every width 0..16 in both groups."""
    gen = rng(seed)
    bits = ALL_WIDTHS.repeat(groups)
    scale = torch.exp2(4 * torch.randn(bits.numel(), generator=gen, dtype=dtype))
    loudness = torch.exp2(2 * torch.randn(tokens, 1, generator=gen, dtype=dtype))
    return torch.randn(tokens, bits.numel(), generator=gen, dtype=dtype) * scale * loudness, scale, bits, groups


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_codes_equal_the_formula(dtype, seed):
    h, scale, bits, groups = random_case(seed, dtype)
    alpha = token_scale(h, scale, bits, groups)
    codes = quantize(h, alpha, scale, bits)
    back = dequantize(codes, alpha, scale, bits)
    assert (codes.dtype, back.dtype) == (torch.int32, dtype)
    # rounding can only move h / step by a few units in the last place of at most 2^15
    margin = Fraction(8 * torch.finfo(dtype).eps) * 2**15
    near = 0
    for token in range(h.shape[0]):
        for channel, width in enumerate(bits.tolist()):
            step = exact_step(float(alpha[token, channel // 17]), float(scale[channel]), width)
            code, distance = exact_code(float(h[token, channel]), step, width)
            found = int(codes[token, channel])
            near += distance < margin
            assert found == code if distance >= margin else abs(found - code) <= 1
            assert float(back[token, channel]) == pytest.approx(float(found * step), rel=4 * torch.finfo(dtype).eps)
    assert near < (1 if dtype == torch.float64 else 0.2 * h.numel())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_round_up(dtype):
    """floor(x + 1/2) sends halves towards plus infinity, unlike rounding to even or away from zero."""
    bits, scale = torch.tensor([3]), torch.tensor([2.0], dtype=dtype)
    alpha = torch.ones(8, 1, dtype=torch.float16)  # step 2 * 1 * 2 / 8 = 1/2
    places = torch.tensor([-4.5, -3.5, -2.5, -0.5, 0.5, 1.5, 2.5, 3.5], dtype=dtype)
    codes = quantize(places[:, None] * 0.5, alpha, scale, bits)[:, 0]
    assert codes.tolist() == [-4, -3, -2, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_scale_is_the_largest_coded_ratio_in_float16(dtype):
    h, scale, bits, groups = random_case(7, dtype)
    alpha = token_scale(h, scale, bits, groups)
    assert alpha.dtype == torch.float16
    assert alpha.shape == (h.shape[0], groups)
    for token in range(h.shape[0]):
        for group in range(groups):
            inside = [c for c in range(17 * group, 17 * (group + 1)) if bits[c] > 0]
            largest = max(abs(float(h[token, c])) / float(scale[c]) for c in inside)
            assert float(alpha[token, group]) == pytest.approx(largest, rel=2.0**-11 * 1.001)


def test_token_scale_ignores_channels_without_bits():
    h = torch.tensor([[1.0, 1e4, 0.5, 3.0]])
    scale = torch.ones(4)
    assert token_scale(h, scale, torch.tensor([4, 0, 4, 0]), 1).item() == 1.0
    assert token_scale(h, scale, torch.tensor([4, 1, 4, 0]), 1).item() == 1e4
    assert token_scale(h, scale, torch.tensor([0, 0, 4, 0]), 2).tolist() == [[0.0, 0.5]]
    assert token_scale(-h, scale, torch.tensor([4, 1, 4, 0]), 1).item() == 1e4


def test_groups_have_their_own_token_scale():
    h, scale, bits, groups = random_case(8, torch.float64)
    louder = h.clone()
    louder[:, 17:] *= 64
    before, after = token_scale(h, scale, bits, groups), token_scale(louder, scale, bits, groups)
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(64 * before[:, 1], after[:, 1])
    assert torch.equal(token_scale(h, scale, bits, 1)[:, 0], before.amax(1))


@pytest.mark.parametrize("width", range(1, 17))
def test_code_range_is_asymmetric_and_reached(width):
    bits, scale = torch.tensor([width]), torch.tensor([1.5], dtype=torch.float64)
    h = torch.linspace(-3.0, 3.0, 4 * 2**width + 1, dtype=torch.float64)[:, None]
    alpha = torch.full((h.shape[0], 1), 2.0, dtype=torch.float16)
    codes = quantize(h, alpha, scale, bits)
    assert (codes.min().item(), codes.max().item()) == (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    assert codes.unique().numel() == 2**width
    low, high = code_range(bits)
    assert (low.item(), high.item()) == (-(2 ** (width - 1)), 2 ** (width - 1) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", range(1, 17))
def test_error_is_half_a_step_inside_and_a_step_at_the_upper_edge(dtype, width):
    bits, scale = torch.full((1,), width), torch.tensor([1.25], dtype=dtype)
    h = 3.75 * (2 * torch.rand(4000, 1, generator=rng(width), dtype=dtype) - 1)
    h[0], h[1] = 3.75, -3.75
    alpha = torch.full((4000, 1), 3.0, dtype=torch.float16)
    step = 2 * 3.0 * 1.25 / 2**width
    error = (dequantize(quantize(h, alpha, scale, bits), alpha, scale, bits) - h).abs() / step
    slack = 4 * torch.finfo(dtype).eps * 2**width
    inside = h <= 3.75 - step / 2
    assert 0.45 < error[inside].max() <= 0.5 + slack
    assert error[~inside].min() >= 0.5 - slack
    assert error.max().item() == error[0].item() == pytest.approx(1.0, abs=slack)
    assert error[1].item() == pytest.approx(0.0, abs=slack)


@pytest.mark.parametrize("width", [2, 8, 12, 16])
def test_rounding_of_the_token_scale_costs_at_most_its_own_precision(width):
    """alpha may round down by 2^-11: the loudest channel is then clipped by that share of itself, never more."""
    gen, bits = rng(99), torch.full((6,), width)
    h = torch.randn(3000, 6, generator=gen, dtype=torch.float64)
    scale = torch.ones(6, dtype=torch.float64)
    alpha = token_scale(h, scale, bits, 1)
    error = (dequantize(quantize(h, alpha, scale, bits), alpha, scale, bits) - h).abs()
    peak = h.abs().amax(1, keepdim=True)
    assert (error <= steps(alpha, scale, bits) + 2.0**-11 * peak).all()
    assert (error / steps(alpha, scale, bits)).max() > (0.9 if width < 12 else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tokens_come_back_as_exact_zeros(dtype):
    h, scale, bits, groups = random_case(3, dtype)
    h[5], h[6] = 0.0, 1e-30
    alpha = token_scale(h, scale, bits, groups)
    codes = quantize(h, alpha, scale, bits)
    back = dequantize(codes, alpha, scale, bits)
    assert alpha[5:7].tolist() == [[0.0, 0.0]] * 2
    assert not codes[5:7].any()
    assert not back[5:7].any()
    assert torch.isfinite(back).all()
    assert not codes[:, bits == 0].any()
    assert codes[:, bits > 1].any(0).all()


def test_a_token_beyond_float16_is_clipped_not_lost():
    h = torch.tensor([[2e5, -2e5, 1.0]])
    scale, bits = torch.ones(3), torch.tensor([8, 8, 8])
    alpha = token_scale(h, scale, bits, 1)
    codes = quantize(h, alpha, scale, bits)
    assert alpha.item() == 65504.0
    assert codes.tolist() == [[127, -128, 0]]


@pytest.mark.parametrize("width", [6, 8])
def test_noise_model_is_the_measured_error_of_uniform_latents(width):
    """step^2 / 12, and the edge: a share 2^-(b+1) of the range rounds past the highest code, at 7 times that."""
    bits, scale = torch.tensor([width, 0]), torch.tensor([0.7, 5.0], dtype=torch.float64)
    h = 2 * torch.rand(400_000, 2, generator=rng(width), dtype=torch.float64) - 1
    h[:, 0] *= 1.5 * 0.7
    alpha = torch.full((h.shape[0], 1), 1.5, dtype=torch.float16)
    error = dequantize(quantize(h, alpha, scale, bits), alpha, scale, bits) - h
    measured = error.square().mean(0)
    modelled = noise_variance(alpha, scale, bits, h.square().mean(0))
    assert modelled.shape == h.shape
    ratio = (measured / modelled[0]).tolist()
    assert ratio[0] == pytest.approx(1 + 6 * 2.0 ** -(width + 1), rel=0.01)
    assert ratio[1] == pytest.approx(1.0, rel=1e-12)  # a dropped channel loses its variance
    assert torch.equal(steps(alpha, scale, bits)[0, :1], torch.tensor([2 * 1.5 * 0.7 / 2**width], dtype=torch.float64))
