"""Signposts against k-means by exhaustion, and dense-and-sparse coding against its definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from aatc_cli.core.overheads import outlier_count
from aatc_cli.core.signposts import SignpostCodec, place_signposts


def best_partition(values, weights, count):
    """Least weighted squared error of any partition of the sorted values into ``count`` runs."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]

    def cost(start, stop):
        v, w = values[start:stop], weights[start:stop]
        return float((w * (v - (w @ v) / w.sum()) ** 2).sum())

    return min(
        sum(cost(a, b) for a, b in zip((0, *cuts), (*cuts, values.size), strict=True))
        for cuts in combinations(range(1, values.size), count - 1)
    )


@pytest.mark.parametrize("seed", range(5))
def test_signposts_are_near_the_best_partition(seed):
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=18), rng.random(18) + 0.01
    points = place_signposts(values, weights, 2)
    found = float((weights * np.abs(values[:, None] - points).min(1) ** 2).sum())
    best = best_partition(values, weights, 4)
    assert best - 1e-12 <= found <= 1.7 * best
    # a fixed point: every point is the weighted mean of the values nearest to it
    nearest = np.abs(values[:, None] - points).argmin(1)
    for index in range(4):
        mine = nearest == index
        assert points[index] == pytest.approx((weights[mine] @ values[mine]) / weights[mine].sum())


def test_signposts_on_clusters_are_the_weighted_means():
    values = np.array([-1.0, -0.9, -0.2, 0.0, 0.3, 0.31, 0.9, 1.0])
    weights = np.array([1.0, 3.0, 1.0, 1.0, 2.0, 2.0, 0.0, 5.0])
    assert place_signposts(values, weights, 2) == pytest.approx([-0.925, -0.1, 0.305, 1.0])
    assert place_signposts(values, np.zeros(8), 1) == pytest.approx([-1.0, 1.0])


def test_weights_pull_the_signposts():
    values = np.linspace(-1, 1, 401)
    even = place_signposts(values, np.ones(401), 2)
    right = place_signposts(values, np.where(values > 0, 50.0, 1.0), 2)
    assert even == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=0.02)
    assert (right > 0).sum() >= 3


def test_outliers_are_counted_per_token():
    assert [outlier_count(0.01, channels) for channels in (32, 100, 192, 512, 1024)] == [1, 1, 2, 6, 11]
    assert outlier_count(0.0, 64) == 0


def coded(value, centre, half, points):
    unit = (value - centre) / half
    return centre + half * min(points, key=lambda point: abs(point - unit))


def test_keys_by_calibrated_channel_ranges():
    torch.manual_seed(0)
    x = torch.randn(7, 10) * torch.linspace(0.5, 4, 10)
    points = torch.tensor([-0.8, -0.3, 0.2, 0.9])
    low, high = -torch.linspace(0.6, 5, 10), torch.linspace(0.5, 6, 10)
    found = SignpostCodec(points, 0.15, low, high, block=3).reconstruct(x)
    centre, half = ((high + low) / 2).tolist(), ((high - low) / 2).tolist()
    for start in (0, 3):
        places = [(t, c) for t in range(start, start + 3) for c in range(10)]
        size = {(t, c): abs(float(x[t, c]) - centre[c]) / half[c] for t, c in places}
        exact = sorted(places, key=lambda place: -size[place])[:5]
        for t, c in places:
            value = float(x[t, c])
            want = float(np.float16(value)) if (t, c) in exact else coded(value, centre[c], half[c], points.tolist())
            assert float(found[t, c]) == pytest.approx(want, abs=1e-5)
    # what is behind the last whole block never leaves the window
    assert torch.equal(found[6], x[6])


@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_values_by_the_range_of_their_token(outliers):
    torch.manual_seed(1)
    x = torch.randn(6, 12) ** 3
    points = torch.tensor([-0.9, -0.2, 0.3, 1.0])
    found = SignpostCodec(points, outliers / 12).reconstruct(x)
    for t in range(6):
        order = sorted(range(12), key=lambda c: float(x[t, c]))
        exact = order[: outliers // 2] + order[12 - (outliers - outliers // 2) :]
        rest = [float(x[t, c]) for c in range(12) if c not in exact]
        centre, half = float(np.float16((max(rest) + min(rest)) / 2)), float(np.float16((max(rest) - min(rest)) / 2))
        for c in range(12):
            value = float(x[t, c])
            want = float(np.float16(value)) if c in exact else coded(value, centre, half, points.tolist())
            assert float(found[t, c]) == pytest.approx(want, abs=1e-4)


def test_tokens_without_spread_stay_finite():
    codec = SignpostCodec(torch.tensor([-1.0, 1.0]), 0.1)
    assert torch.isfinite(codec.reconstruct(torch.zeros(2, 8))).all()
    static = SignpostCodec(torch.tensor([-1.0, 1.0]), 0.1, torch.zeros(8), torch.zeros(8))
    assert torch.isfinite(static.reconstruct(torch.full((2, 8), 3.0))).all()
