"""Streaming sums against two passes in exact or longer arithmetic; sampled rows; the output Gram matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.core.stats import LayerStats, output_gram, sample_rows

GEOMETRY = Geometry(layers=1, heads=6, kv_heads=3, head_dim=4, hidden_size=10)
CHANNELS, DIM = GEOMETRY.channels, GEOMETRY.head_dim
EPS = np.finfo(np.float64).eps


def draw(tokens: int, offset: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, GEOMETRY.heads, DIM, generator=gen, dtype=torch.float64)
    k, v = (torch.randn(tokens, CHANNELS, generator=gen, dtype=torch.float64) + offset for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def streamed(q, k, v, batches: list[int], rows: int = 0, samples: list[torch.Tensor] | None = None) -> LayerStats:
    stats = LayerStats.empty(GEOMETRY, rows, torch.zeros(GEOMETRY.kv_heads, DIM, DIM))
    samples = samples or [torch.zeros(0, dtype=torch.int64)] * len(batches)
    for part, sample in zip(zip(*(x.split(batches) for x in (q, k, v)), strict=True), samples, strict=True):
        stats.update(*part, sample)
    return stats


def exact_outer(x: torch.Tensor) -> np.ndarray:
    """Sum of x x^T with correctly rounded products and an exact sum."""
    columns = x.to(torch.float64).numpy().T
    wide = columns.astype(np.longdouble)
    return np.array([[math.fsum((a * b).tolist()) for b in wide] for a in wide])


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e8])
@pytest.mark.parametrize("batches", [[301], [1, 7, 64, 200, 29], [1] * 301], ids=["one", "uneven", "single"])
def test_sums_are_those_of_two_passes(offset, batches):
    """Also under a large common offset, where float32 sums would lose everything but the offset."""
    q, k, v = draw(301, offset)
    stats = streamed(q, k, v, batches)
    assert stats.count == 301
    for outer, total, x in ((stats.k_outer, stats.k_sum, k), (stats.v_outer, stats.v_sum, v)):
        np.testing.assert_allclose(outer.numpy(), exact_outer(x), rtol=301 * EPS, atol=301 * 20 * EPS)
        exact = [math.fsum(column.tolist()) for column in x.T]
        np.testing.assert_allclose(total.numpy(), exact, rtol=301 * EPS, atol=301 * 20 * EPS)
    assert torch.equal(stats.k_outer, stats.k_outer.T)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_a_common_offset_costs_the_covariance_its_square_and_no_more(offset):
    """Sums about zero: a covariance taken from them loses a few offset^2 * eps, half a thousandth at 1e6."""
    q, k, v = draw(4000, offset)
    stats = streamed(q, k, v, [1000] * 4)
    mean = stats.k_sum / stats.count
    covariance = stats.k_outer / stats.count - torch.outer(mean, mean)
    centred = k - k.mean(0)
    error = (covariance - centred.T @ centred / 4000).abs().max().item()
    assert offset**2 * EPS / 10 <= error <= 10 * offset**2 * EPS + 1e-14


@pytest.mark.parametrize(
    ("mean", "spread"), [(1e6, 1e-2), (1e6, 1.0), (1e4, 1e-3), (1e3, 1e-3), (-1e2, 1e-2), (0.0, 1e-6), (1e-8, 1e-12)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cancellation_costs_the_square_of_mean_over_spread(mean, spread, dtype):
    """Moments about zero, which the transforms are made of, are exact to rounding whatever the mean.

    A covariance taken from them is off by the rounding of mean^2, so by (mean / spread)^2 eps of itself: eight digits
    are left at 1e4, and none at 1e8. Two passes over the rows lose nothing.
    """
    gen = torch.Generator().manual_seed(5)
    k = (mean + spread * torch.randn(2000, CHANNELS, generator=gen, dtype=torch.float64)).to(dtype)
    q = torch.randn(2000, GEOMETRY.heads, DIM, generator=gen, dtype=dtype)
    stats = streamed(q, k, -k, [700, 1, 1299])
    wide = k.numpy().astype(np.longdouble)
    moments = (wide.T @ wide).astype(np.float64)
    np.testing.assert_allclose(stats.k_outer.numpy(), moments, rtol=2000 * EPS, atol=2000 * EPS * spread**2)
    assert torch.equal(stats.v_outer, stats.k_outer)
    average = wide.mean(0)
    np.testing.assert_allclose(
        stats.k_sum.numpy() / 2000, average.astype(np.float64), rtol=100 * EPS, atol=100 * EPS * spread
    )
    two_pass = ((wide - average).T @ (wide - average) / 2000).astype(np.float64)
    found = (stats.k_outer / 2000 - torch.outer(stats.k_sum, stats.k_sum) / 2000**2).numpy()
    error = np.abs(found - two_pass).max() / two_pass.diagonal().max()
    lost = (mean**2 / two_pass.diagonal().max() + 1) * EPS
    assert error <= 100 * lost
    # float32 sums would lose the spread already at a tenth of a thousandth of the mean
    narrow = k.float().T @ k.float()
    assert np.abs(narrow.double().numpy() - moments).max() > 1e-8 * np.abs(moments).max()


def test_batches_do_not_change_the_sums():
    data = draw(128)
    one, many = streamed(*data, [128]), streamed(*data, [5, 60, 63])
    for name in ("k_outer", "v_outer", "k_sum", "v_sum", "q_outer"):
        torch.testing.assert_close(getattr(one, name), getattr(many, name), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_low_precision_inputs_are_float64(dtype):
    q, k, v = draw(200, 3.0, dtype=dtype)
    stats = streamed(q, k, v, [100, 100])
    assert {getattr(stats, name).dtype for name in ("k_outer", "v_sum", "q_outer", "o_gram")} == {torch.float64}
    np.testing.assert_allclose(stats.k_outer.numpy(), exact_outer(k), rtol=1e-13)


def test_query_moments_sum_over_the_heads_that_share_a_kv_head():
    q, k, v = draw(50)
    stats = streamed(q, k, v, [20, 30])
    share = GEOMETRY.heads // GEOMETRY.kv_heads
    for kv_head in range(GEOMETRY.kv_heads):
        expected = np.zeros((DIM, DIM))
        for token in range(50):
            for head in range(kv_head * share, (kv_head + 1) * share):
                expected += np.outer(q[token, head], q[token, head])
        np.testing.assert_allclose(stats.q_outer[kv_head].numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(48,), (4, 12), (2, 3, 8)])
def test_tokens_may_lie_in_several_dimensions(shape):
    """Windows with their first positions cut off, as collect gives them, are the tokens of one long list."""
    q, k, v = (x.unflatten(0, (*shape[:-1], -1)) for x in draw(int(np.prod(shape)) + int(np.prod(shape[:-1]))))
    q, k, v = (x[..., 1:, :, :] if x is q else x[..., 1:, :] for x in (q, k, v))
    assert k.shape[:-1] == shape
    found, flat = (LayerStats.empty(GEOMETRY, 2, torch.zeros(GEOMETRY.kv_heads, DIM, DIM)) for _ in range(2))
    sample = torch.tensor([1, 30])
    found.update(q, k, v, sample)
    flat.update(q.reshape(-1, GEOMETRY.heads, DIM), k.reshape(-1, CHANNELS), v.reshape(-1, CHANNELS), sample)
    assert found.count == flat.count == 48
    for name, tensor in found.tensors().items():
        assert torch.equal(tensor, flat.tensors()[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_on_a_gpu_are_those_of_the_cpu_and_wait_for_nothing(dtype):
    """Float64 sums to their last digits; products of gradients to float32, whether on tensor cores or not."""
    geometry = Geometry(layers=1, heads=8, kv_heads=2, head_dim=64, hidden_size=512)
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(2, 600, *shape, generator=generator).to(dtype) for shape in ((8, 64), (128,), (128,), (128,))
    )
    received, sample, found = torch.rand(2, 2, 600, generator=generator), torch.arange(0, 1200, 7), {}
    for device in ("cpu", "cuda"):
        stats = LayerStats.empty(geometry, 300, torch.zeros(2, 64, 64, device=device))
        moved = [x.to(device) for x in (q, k, v, g, received, sample)]
        for times in range(2):
            # the first time tables and libraries are loaded
            if device == "cuda" and times:
                torch.cuda.set_sync_debug_mode("error")
            try:
                stats.update(*(x[:, 4:] for x in moved[:3]), moved[5][:100])
                stats.add_gradients("k", moved[3].flatten(0, 1))
                stats.add_ranked("k", moved[4], moved[3], Window())
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        found[device] = {name: tensor.cpu() for name, tensor in stats.tensors().items()}
    for name, expected in found["cpu"].items():
        slack = 1e-12 if name in ("k_outer", "v_outer", "k_sum", "v_sum", "q_outer") else 1e-5
        torch.testing.assert_close(
            found["cuda"][name], expected, rtol=0, atol=slack * float(expected.abs().max()), msg=name
        )


def test_rows_are_kept_in_order_and_cut_to_what_was_filled():
    q, k, v = draw(30)
    stats = streamed(q, k, v, [10, 20], rows=8, samples=[torch.tensor([1, 9]), torch.tensor([0, 3, 19])])
    kept = [1, 9, 10, 13, 29]
    parts = stats.tensors()
    assert torch.equal(parts["k_rows"], k[kept].to(torch.float32))
    assert torch.equal(parts["v_rows"], v[kept].to(torch.float32))
    assert (stats.filled, stats.k_rows.shape[0]) == (5, 8)
    assert set(parts) == set(LayerStats.TENSORS) - set(LayerStats.OPTIONAL)


def test_more_rows_than_there_is_room_for_are_an_error():
    q, k, v = draw(10)
    with pytest.raises(RuntimeError):
        streamed(q, k, v, [10], rows=2, samples=[torch.tensor([0, 1, 2])])


def test_output_gram_against_loops():
    weight = torch.randn(GEOMETRY.hidden_size, GEOMETRY.heads * DIM, generator=torch.Generator().manual_seed(3))
    gram = output_gram(weight, GEOMETRY)
    assert gram.dtype == torch.float64
    for kv_head in range(GEOMETRY.kv_heads):
        expected = np.zeros((DIM, DIM))
        for head in (2 * kv_head, 2 * kv_head + 1):
            block = weight.to(torch.float64).numpy()[:, head * DIM : (head + 1) * DIM].T  # W_O^head [D, M]
            for d in range(DIM):
                for e in range(DIM):
                    expected[d, e] += sum(block[d, m] * block[e, m] for m in range(GEOMETRY.hidden_size))
        np.testing.assert_allclose(gram[kv_head].numpy(), expected, rtol=1e-12, atol=1e-12)


def test_sampled_rows_are_sorted_distinct_and_reproducible():
    rows = sample_rows(seed=5, window=3, tokens=100, quota=40)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert (rows.numel(), int(rows.min()) >= 0, int(rows.max()) < 100) == (40, True, True)
    torch.manual_seed(123)  # the global generator has no say
    assert torch.equal(rows, sample_rows(5, 3, 100, 40))
    assert not torch.equal(rows, sample_rows(5, 4, 100, 40))
    assert not torch.equal(rows, sample_rows(6, 3, 100, 40))
    assert sample_rows(0, 0, 10, 0).numel() == 0
    assert sample_rows(0, 0, 10, 99).tolist() == list(range(10))


def test_sampled_rows_are_uniform_over_the_window():
    counts = torch.zeros(50)
    for window in range(2000):
        counts[sample_rows(0, window, 50, 10)] += 1
    # 400 expected each with a deviation of 18
    assert 310 < counts.min() < 400 < counts.max() < 490
