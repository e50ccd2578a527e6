"""Divergences against scipy and plain sums, standard errors against the statistics module."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from aatc_cli.core.metrics import kl_divergence, mean_and_stderr, negative_log_likelihood


def logits(*shape: int, seed: int = 0, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def scipy_kl(p: torch.Tensor, q: torch.Tensor) -> np.ndarray:
    one, two = (np.exp(log_softmax(x.to(torch.float64).numpy(), axis=-1)) for x in (p, q))
    return rel_entr(one, two).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kl_is_scipys(dtype):
    p, q = logits(3, 40, 500, dtype=dtype), logits(3, 40, 500, seed=1, dtype=dtype)
    found = kl_divergence(p, q)
    assert found.shape == (3, 40)
    np.testing.assert_allclose(found.numpy(), scipy_kl(p, q), rtol=1e-9)


def test_kl_of_two_outcomes_by_hand():
    p, q = torch.tensor([math.log(3.0), 0.0]), torch.tensor([0.0, 0.0])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_divergence(p, q).item() == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(q, p).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), rel=1e-6)


def test_kl_is_zero_for_equal_and_for_shifted_logits():
    p = logits(20, 5000)
    assert kl_divergence(p, p).tolist() == [0.0] * 20
    assert kl_divergence(p, p + 4.0).max() < 1e-12


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
def test_small_divergences_are_resolved(size):
    """For a small change d of the logits KL is half the variance of d under p: 5e-9 nats at 1e-4."""
    p = logits(32, 30_000).to(torch.float64)
    change = logits(32, 30_000, seed=2, spread=size).to(torch.float64)
    found = kl_divergence(p.float(), (p + change).float())
    weights = torch.softmax(p, -1)
    mean = (weights * change).sum(-1, keepdim=True)
    expected = 0.5 * (weights * (change - mean).square()).sum(-1)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=0.05)
    assert found.mean().item() == pytest.approx(size**2 / 2, rel=0.05)


def test_kl_is_finite_far_apart():
    p, q = torch.tensor([[0.0, 200.0, -200.0]]), torch.tensor([[300.0, 0.0, 0.0]])
    assert kl_divergence(p, q).item() == pytest.approx(300.0, rel=1e-9)


def test_negative_log_likelihood_against_plain_sums():
    x, targets = logits(12, 50), torch.arange(12) * 3
    found = negative_log_likelihood(x, targets)
    for row, target, value in zip(x.tolist(), targets.tolist(), found.tolist(), strict=True):
        expected = math.log(math.fsum(math.exp(v) for v in row)) - row[target]
        assert value == pytest.approx(expected, rel=1e-5)
    uniform = negative_log_likelihood(torch.zeros(1, 50, dtype=torch.bfloat16), torch.tensor([7]))
    assert (uniform.item(), uniform.dtype) == (pytest.approx(math.log(50), rel=1e-6), torch.float32)


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.25, -3.0, 8.0, 8.0], [1e9 + x for x in (0.0, 1.0, 2.0, 5.0)]])
def test_mean_and_standard_error(values):
    mean, stderr = mean_and_stderr(values)
    assert mean == pytest.approx(statistics.fmean(values), rel=1e-15)
    assert stderr == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, rel=1e-12)


def test_a_single_window_has_no_standard_error():
    assert mean_and_stderr([0.5]) == (0.5, None)
    assert mean_and_stderr([0.5, 0.5]) == (0.5, 0.0)
