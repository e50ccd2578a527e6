"""Lloyd-Max levels against the published tables and numerical integration; quantization against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from aatc_cli.config import MAX_BITS
from aatc_cli.core.curves import DISTORTION, DISTORTION_UNIFORM
from aatc_cli.core.lloyd import CANDIDATES, Tables, dequantize, noise_variance, quantize
from aatc_cli.core.lloyd_levels import LLOYD_BITS, levels, uniform_step, unit_distortion

# positive levels and mean squared error of J. Max, "Quantizing for minimum distortion" (1960), Table I
PUBLISHED = {
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}
# step and mean squared error of its Table II, for evenly spaced levels
PUBLISHED_UNIFORM = {1: (1.596, 0.3634), 2: (0.9957, 0.1188), 3: (0.5860, 0.03744), 4: (0.3352, 0.01154)}
WIDTHS = range(MAX_BITS + 1)


def edges_of(points: np.ndarray) -> np.ndarray:
    return np.concatenate(([-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]))


def integrated_distortion(points: np.ndarray) -> float:
    """E (x - q(x))^2 of a unit normal, cell by cell: Gauss-Legendre inside, adaptive quadrature in the two tails."""
    nodes, weights = np.polynomial.legendre.leggauss(12)
    inner = edges_of(points)[1:-1]
    middle, radius = (inner[1:] + inner[:-1]) / 2, (inner[1:] - inner[:-1]) / 2
    x = middle[:, None] + radius[:, None] * nodes
    inside = np.sum(radius[:, None] * weights * (x - points[1:-1, None]) ** 2 * norm.pdf(x))
    tail = quad(lambda x: (x - points[-1]) ** 2 * norm.pdf(x), inner[-1], np.inf, epsabs=1e-16)[0]
    return float(inside + 2 * tail)


def nearest_level(z: np.ndarray, points: np.ndarray) -> np.ndarray:
    return np.abs(z[:, None] - points).argmin(1)


def tables(*bits: int, uniform: bool = False) -> Tables:
    return Tables.of(torch.tensor(bits), torch.zeros(1, dtype=torch.float64), uniform)


def even_levels(bits: int) -> np.ndarray:
    """Mid-rise levels, zero at zero bits."""
    return (np.arange(2**bits) - (2**bits - 1) / 2) * uniform_step(bits)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_levels_are_the_published_ones(bits):
    """The tables of 1960 are good to about a unit of their last digit."""
    positive, error = PUBLISHED[bits]
    found = levels(bits).numpy()
    np.testing.assert_allclose(found[2 ** (bits - 1) :], positive, rtol=8e-4)
    assert DISTORTION[bits] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bits", range(1, LLOYD_BITS + 1))
def test_every_level_is_the_mean_of_its_cell(bits):
    points = levels(bits).numpy()
    edges = edges_of(points)
    for level, low, high in zip(points, edges[:-1], edges[1:], strict=True):
        mass = quad(norm.pdf, low, high, epsabs=1e-14, epsrel=1e-11)[0]
        first = quad(lambda x: x * norm.pdf(x), low, high, epsabs=1e-14, epsrel=1e-11)[0]
        assert level == pytest.approx(first / mass, abs=2e-8)


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_levels_rise_and_are_symmetric(bits):
    points = levels(bits).numpy()
    assert points.size == 2**bits
    assert (np.diff(points) > 0).all()
    np.testing.assert_allclose(points, -points[::-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", range(LLOYD_BITS + 1, MAX_BITS + 1))
def test_wide_codes_have_the_best_uniform_step(bits):
    points = levels(bits).numpy()
    np.testing.assert_allclose(np.diff(points), points[1] - points[0], rtol=1e-9)
    best = integrated_distortion(points)
    for factor in (0.98, 1.02):
        assert integrated_distortion(points * factor) > best * 1.00001


def test_zero_bits_read_zero():
    assert levels(0).tolist() == [0.0]
    assert DISTORTION[0] == 1.0


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_distortion_constants(bits):
    points = levels(bits).numpy()
    assert DISTORTION[bits] == pytest.approx(unit_distortion(points), rel=1e-6)
    assert DISTORTION[bits] == pytest.approx(integrated_distortion(points), rel=1e-6)


@pytest.mark.parametrize("bits", PUBLISHED_UNIFORM)
def test_uniform_steps_are_the_published_ones(bits):
    step, error = PUBLISHED_UNIFORM[bits]
    assert uniform_step(bits) == pytest.approx(step, rel=3e-4)
    assert DISTORTION_UNIFORM[bits] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_uniform_distortion_constants(bits):
    points = even_levels(bits)
    assert DISTORTION_UNIFORM[bits] == pytest.approx(unit_distortion(points), rel=1e-6)
    assert DISTORTION_UNIFORM[bits] == pytest.approx(integrated_distortion(points), rel=1e-6)
    for factor in (0.98, 1.02):
        assert integrated_distortion(points * factor) > DISTORTION_UNIFORM[bits] * 1.00001
    # no evenly spaced levels beat Lloyd's; with two levels there is nothing to space, from 8 bits both are even
    assert (DISTORTION_UNIFORM[bits] > DISTORTION[bits]) == (1 < bits <= LLOYD_BITS)


@pytest.mark.parametrize("curve", [DISTORTION, DISTORTION_UNIFORM], ids=["lloyd", "uniform"])
def test_distortion_is_convex_and_falling(curve):
    """What makes greedy allocation over this curve exact."""
    gains = -np.diff(curve)
    assert len(curve) == MAX_BITS + 1
    assert curve[0] == 1.0
    assert (gains > 0).all()
    assert (np.diff(gains) < 0).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_nearest_is_the_nearest_level(bits):
    z = torch.cat((normal(150, seed=bits), 4 * normal(50, seed=99), torch.tensor([-1e6, 1e6], dtype=torch.float64)))
    points = levels(bits).numpy()
    found = tables(bits).nearest(z[:, None])[:, 0]
    assert found.tolist() == nearest_level(z.numpy(), points).tolist()


def test_channels_of_all_widths_quantize_at_once():
    z = 2 * normal(300, MAX_BITS + 1)
    found = tables(*WIDTHS)
    index = found.nearest(z)
    for bits in WIDTHS:
        points = levels(bits).numpy()
        assert index[:, bits].tolist() == nearest_level(z[:, bits].numpy(), points).tolist()
        np.testing.assert_allclose(found.values(index)[:, bits], points[index[:, bits].long()], rtol=1e-12, atol=1e-15)


def test_uniform_channels_of_all_widths_quantize_at_once():
    z = 2 * normal(300, MAX_BITS + 1, seed=7)
    found = tables(*WIDTHS, uniform=True)
    index = found.nearest(z)
    for bits in WIDTHS:
        points = even_levels(bits)
        assert index[:, bits].tolist() == nearest_level(z[:, bits].numpy(), points).tolist()
        np.testing.assert_allclose(found.values(index)[:, bits], points[index[:, bits].long()], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
def test_values_are_the_inverse_of_nearest(bits, uniform):
    points, table = torch.from_numpy(even_levels(bits)) if uniform else levels(bits), tables(bits, uniform=uniform)
    index = table.nearest(points[:, None])
    assert index[:, 0].tolist() == list(range(2**bits))
    torch.testing.assert_close(table.values(index)[:, 0], points, rtol=1e-12, atol=1e-15)


BITS = [0, 1, 2, 3, 5, 9, 4, 0, 2, 2, 7, 8]


def setting(groups: int = 2, uniform: bool = False):
    sigma, weight = torch.exp2(normal(len(BITS), seed=1)), torch.exp2(3 * normal(len(BITS), seed=2))
    h = normal(60, len(BITS), seed=3) * sigma * torch.exp2(2 * normal(60, 1, seed=4))
    return h, sigma, tables(*BITS, uniform=uniform), weight, groups


def best_of_candidates(h, sigma, bits, weight, uniform):
    """The candidate scales of one token and group, and the weighted squared error of each. float64 numpy."""
    coded = bits > 0
    rms = np.sqrt(np.mean((h[coded] / sigma[coded]) ** 2))
    alphas = [float(np.float16(rms * factor)) for factor in CANDIDATES]
    errors = []
    for alpha in alphas:
        total = 0.0
        for x, s, b, w in zip(h[coded], sigma[coded], bits[coded], weight[coded], strict=True):
            points = (even_levels(b) if uniform else levels(int(b)).numpy()) * alpha * s
            total += w * np.abs(x - points).min() ** 2
        errors.append(total)
    return alphas, np.array(errors)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_alpha_is_the_best_candidate(groups, uniform):
    h, sigma, table, weight, _ = setting(uniform=uniform)
    codes, alpha = quantize(h, sigma, table, weight, groups)
    assert alpha.dtype == torch.float16
    assert alpha.shape == (60, groups)
    size, bits = len(BITS) // groups, np.array(BITS)
    chosen = set()
    for token in range(60):
        for group in range(groups):
            run = slice(group * size, (group + 1) * size)
            alphas, errors = best_of_candidates(
                h[token, run].numpy(), sigma[run].numpy(), bits[run], weight[run].numpy(), uniform
            )
            assert float(alpha[token, group]) == alphas[errors.argmin()]
            chosen.add(int(errors.argmin()))
            back = dequantize(codes, alpha, sigma, table)[token, run].numpy()
            coded = bits[run] > 0
            left = np.sum((weight[run].numpy() * (h[token, run].numpy() - back) ** 2)[coded])
            assert left == pytest.approx(errors.min(), rel=1e-9)
    assert len(chosen) >= 4, "the search had nothing to decide"


def test_codes_are_in_range_and_absent_channels_zero():
    h, sigma, table, weight, groups = setting()
    codes, alpha = quantize(100 * h, sigma, table, weight, groups)
    assert codes.dtype == torch.int32
    bits = torch.tensor(BITS)
    half = torch.where(bits > 0, 2 ** (bits - 1).clamp_min(0), 1)
    assert ((codes >= -half) & (codes <= half - 1))[:, bits > 0].all()
    assert (codes[:, bits == 0] == 0).all()
    assert (dequantize(codes, alpha, sigma, table)[:, bits == 0] == 0).all()
    # the narrow channels use every code they have
    assert set(codes[:, 1].tolist()) == {-1, 0}
    assert set(codes[:, 2].tolist()) == {-2, -1, 0, 1}


def test_absent_channels_have_no_say():
    h, sigma, table, weight, groups = setting()
    louder = h.clone()
    louder[:, [0, 7]] = 1e4
    for one, other in zip(
        quantize(h, sigma, table, weight, groups), quantize(louder, sigma, table, weight, groups), strict=True
    ):
        assert torch.equal(one, other)


def test_groups_are_independent():
    h, sigma, table, weight, groups = setting()
    changed = h.clone()
    changed[:, 6:] *= 3
    (codes, alpha), (others, scales) = (quantize(x, sigma, table, weight, groups) for x in (h, changed))
    assert torch.equal(codes[:, :6], others[:, :6])
    assert torch.equal(alpha[:, 0], scales[:, 0])
    assert not torch.equal(alpha[:, 1], scales[:, 1])


def test_a_zero_token_comes_back_as_zeros():
    h, sigma, table, weight, groups = setting()
    h[5] = 0
    codes, alpha = quantize(h, sigma, table, weight, groups)
    assert alpha[5].tolist() == [0.0, 0.0]
    assert (dequantize(codes, alpha, sigma, table)[5] == 0).all()
    assert (alpha[:5] > 0).all()


def test_leading_dimensions_are_kept():
    h, sigma, table, weight, groups = setting()
    codes, alpha = quantize(h, sigma, table, weight, groups)
    folded, scales = quantize(h.reshape(3, 4, 5, -1), sigma, table, weight, groups)
    assert torch.equal(folded.reshape(codes.shape), codes)
    assert torch.equal(scales.reshape(alpha.shape), alpha)
    torch.testing.assert_close(
        dequantize(folded, scales, sigma, table).reshape(h.shape), dequantize(codes, alpha, sigma, table)
    )


def test_what_comes_back_is_coded_as_itself():
    """Decoded latents are levels, so coding them again with the scale they came from changes nothing."""
    h, sigma, table, weight, groups = setting()
    codes, alpha = quantize(h, sigma, table, weight, groups)
    back = dequantize(codes, alpha, sigma, table)
    by_channel = alpha.double().repeat_interleave(len(BITS) // groups, -1)
    index = table.nearest(back / (by_channel * sigma))
    again = torch.where(table.bits > 0, index - table.half, 0.0).to(torch.int32)
    assert torch.equal(again, codes)


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e7, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_that_float16_does_not_hold_stay_finite(size, dtype):
    """Where the scale saturates, so do the latents: with the right sign, at most the largest scale times the level."""
    h, sigma, _, weight, groups = setting()
    table = Tables.of(torch.tensor(BITS), torch.zeros(1, dtype=dtype))
    h, sigma, weight = (h * size).to(dtype), sigma.to(dtype), weight.to(dtype)
    codes, alpha = quantize(h, sigma, table, weight, groups)
    back = dequantize(codes, alpha, sigma, table)
    assert torch.isfinite(alpha).all()
    assert torch.isfinite(back).all()
    if size == 1e12:
        assert (alpha == torch.finfo(torch.float16).max).all()
        assert (back * h >= 0).all()
    if size == 1e-30:
        assert (back == 0).all()


@pytest.mark.parametrize("size", [1e15, 1e20, 1e30, 1e37, float("inf")])
def test_latents_whose_squares_overflow_saturate(size):
    """In float32 the square of 1e20 is infinite: the loud groups come back at the largest scale, not as zeros."""
    h, sigma, _, weight, groups = setting()
    table = Tables.of(torch.tensor(BITS), torch.zeros(1))
    h, sigma, weight = h.float(), sigma.float(), weight.float()
    plain, loud = h.clone(), h.clone()
    loud[7:9, :6] = size * torch.sign(h[7:9, :6])
    codes, alpha = quantize(loud, sigma, table, weight, groups)
    assert (alpha[7:9, 0] == torch.finfo(torch.float16).max).all()
    half = 2 ** (torch.tensor(BITS[1:6]) - 1)
    outermost = torch.where(h[7:9, 1:6] > 0, half - 1, -half)
    assert torch.equal(codes[7:9, 1:6], outermost.to(torch.int32))
    # other groups and tokens do not notice
    expected = quantize(plain, sigma, table, weight, groups)
    assert torch.equal(codes[:, 6:], expected[0][:, 6:])
    assert torch.equal(codes[9:], expected[0][9:])
    assert torch.equal(alpha[:, 1], expected[1][:, 1])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("loudness", [0.05, 1.0, 40.0])
def test_error_on_normal_data_is_the_constant(bits, loudness):
    """At any loudness of the token: that is what alpha is for. The search loses and gains a few per cent."""
    channels = 128
    sigma = torch.exp2(normal(channels, seed=5))
    h = normal(2000, channels, seed=6) * sigma * loudness
    table = tables(*[bits] * channels)
    codes, alpha = quantize(h, sigma, table, sigma.square().reciprocal(), 1)
    error = ((h - dequantize(codes, alpha, sigma, table)) / sigma / loudness).square().mean()
    assert 0.9 * DISTORTION[bits] < float(error) < 1.1 * DISTORTION[bits]


def test_noise_model():
    sigma, bits = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64), torch.tensor([0, 1, 4, 12])
    alpha = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    expected = [4.0, 0.25 * 9 * DISTORTION[1], 4 * 25 * DISTORTION[4], 4 * 49 * DISTORTION[12]]
    assert noise_variance(alpha, sigma, bits)[0].tolist() == pytest.approx(expected, rel=1e-12)
