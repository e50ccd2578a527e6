"""Attention-aware weights against the paper's averages over explicit queries, heads and latents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.stats import LayerStats, output_gram
from aatc_cli.core.transform import group_moments, loss_metric, whitening
from aatc_cli.core.weights import channel_scales, latent_variance, quadratic_weights

GEOMETRY = Geometry(layers=1, heads=6, kv_heads=2, head_dim=5, hidden_size=17)
SHARE = GEOMETRY.heads // GEOMETRY.kv_heads
CHANNELS, DIM = GEOMETRY.channels, GEOMETRY.head_dim


class Case:
    """Random correlated rows, queries and output projection, and the transform of the rows."""

    def __init__(self, groups: int, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        self.groups, self.size = groups, CHANNELS // groups
        self.rows = normal(200, CHANNELS) @ normal(CHANNELS, CHANNELS) + normal(CHANNELS)
        self.queries = normal(200, GEOMETRY.heads, DIM) * torch.exp(normal(GEOMETRY.heads, DIM))
        self.output = normal(GEOMETRY.hidden_size, GEOMETRY.heads * DIM)
        self.moment = self.rows.T @ self.rows / 200
        parts = [whitening(block) for block in group_moments(self.moment, groups)]
        self.encode = torch.stack([part.encode for part in parts])
        self.decode = torch.stack([part.decode for part in parts])
        self.stats = LayerStats.empty(GEOMETRY, 0, output_gram(self.output, GEOMETRY))
        nothing = torch.zeros(0, dtype=torch.int64)
        self.stats.update(self.queries, self.rows, self.rows, nothing)

    def decode_row(self, channel: int) -> np.ndarray:
        """Row of B as a vector over all channels of the site: zero outside its group."""
        group, inside = divmod(channel, self.size)
        row = np.zeros(CHANNELS)
        row[group * self.size : (group + 1) * self.size] = self.decode[group, inside].numpy()
        return row


@pytest.fixture(params=[1, 2], ids=["one-group", "two-groups"])
def case(request) -> Case:
    return Case(request.param)


def test_key_weight_is_the_mean_squared_query_response(case):
    """w_K[c] = 1/T sum over tokens and query heads of (B_c q)^2, each query meeting its own kv head's part of B_c."""
    weights = quadratic_weights(case.decode, case.stats.q_outer / case.stats.count)
    assert weights.shape == (CHANNELS,)
    for channel in range(CHANNELS):
        row, total = case.decode_row(channel), 0.0
        for head in range(GEOMETRY.heads):
            kv_head = head // SHARE
            part = row[kv_head * DIM : (kv_head + 1) * DIM]
            total += sum(float(np.dot(part, query)) ** 2 for query in case.queries[:, head].numpy())
        assert weights[channel].item() == pytest.approx(total / 200, rel=1e-10)
    assert weights.min() > 0


def test_value_weight_is_the_squared_norm_after_the_output_projection(case):
    """w_V[c] = sum over query heads of ||B_c W_O^head||^2, W_O^head the block of rows that the head multiplies."""
    weights = quadratic_weights(case.decode, case.stats.o_gram)
    for channel in range(CHANNELS):
        row, total = case.decode_row(channel), 0.0
        for head in range(GEOMETRY.heads):
            block = case.output.numpy()[:, head * DIM : (head + 1) * DIM].T
            part = row[(head // SHARE) * DIM : (head // SHARE + 1) * DIM]
            total += float(np.sum((part @ block) ** 2))
        assert weights[channel].item() == pytest.approx(total, rel=1e-10)


def test_weights_of_one_kv_head_are_the_rows_of_b_times_w_o():
    """With a single head the sum is the paper's formula as it stands: ||(B W_O)_c||^2."""
    gen = torch.Generator().manual_seed(1)
    decode = torch.randn(1, 8, 8, generator=gen, dtype=torch.float64)
    weight = torch.randn(11, 8, generator=gen, dtype=torch.float64)
    geometry = Geometry(layers=1, heads=1, kv_heads=1, head_dim=8, hidden_size=11)
    expected = (decode[0] @ weight.T).square().sum(1)
    torch.testing.assert_close(quadratic_weights(decode, output_gram(weight, geometry)), expected, rtol=1e-12, atol=0)


def test_energy_left_by_dropping_a_channel(case):
    """w sigma^2 is what the mean squared logit error becomes when a channel is lost: the point of the weights."""
    weights = quadratic_weights(case.decode, case.stats.q_outer / case.stats.count)
    variance = latent_variance(case.encode, case.moment)
    channel = 3
    lost = np.outer(case.rows.numpy() @ encode_column(case, channel), case.decode_row(channel))
    total = 0.0
    for head in range(GEOMETRY.heads):
        part = lost[:, (head // SHARE) * DIM : (head // SHARE + 1) * DIM]
        total += float(np.mean((part @ case.queries[:, head].numpy().T) ** 2))
    assert (weights * variance)[channel].item() == pytest.approx(total, rel=1e-9)


def encode_column(case: Case, channel: int) -> np.ndarray:
    group, inside = divmod(channel, case.size)
    column = np.zeros(CHANNELS)
    column[group * case.size : (group + 1) * case.size] = case.encode[group, :, inside].numpy()
    return column


def test_latent_variance_is_the_mean_square_of_the_latents(case):
    """About zero, not about the mean: the rows have one."""
    latents = np.stack([case.rows.numpy() @ encode_column(case, c) for c in range(CHANNELS)], axis=1)
    found = latent_variance(case.encode, case.moment).numpy()
    np.testing.assert_allclose(found, (latents**2).mean(0), rtol=1e-9)
    assert not np.allclose(found, latents.var(0), rtol=1e-3)
    # measured with the moment of other rows it is still theirs, no longer S
    other = case.rows * 3
    np.testing.assert_allclose(latent_variance(case.encode, other.T @ other / 200).numpy(), 9 * found, rtol=1e-9)


def test_noise_never_makes_a_variance_or_weight_negative():
    moment = torch.diag(torch.tensor([1.0, -1e-20]))
    eye = torch.eye(2, dtype=torch.float64)[None]
    assert latent_variance(eye, moment).tolist() == [1.0, 0.0]
    assert quadratic_weights(eye, moment[None]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("percentile", [50.0, 99.0, 100.0])
def test_channel_scale_is_the_percentile_of_the_latent_magnitude(case, percentile):
    latents = np.abs(np.stack([case.rows.numpy() @ encode_column(case, c) for c in range(CHANNELS)], axis=1))
    variance = latent_variance(case.encode, case.moment)
    found = channel_scales(case.encode, case.rows.to(torch.float32), variance, percentile)
    # rows are kept in float32, so the oracle may differ by their rounding
    expected = np.percentile(latents, percentile, axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)
    exact = channel_scales(case.encode, case.rows, variance, percentile)
    np.testing.assert_allclose(exact.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 401])
@pytest.mark.parametrize("percentile", [1e-9, 3.0, 49.9, 50.0, 50.1, 99.0, 99.99, 100.0])
def test_percentiles_of_any_number_of_rows(count, percentile):
    """Between the two order statistics around it, on whichever side the shorter list of extreme values is."""
    rows = torch.randn(count, 7, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    rows[: count // 2, 3] = 0.5  # many alike
    found = channel_scales(torch.eye(7, dtype=torch.float64)[None], rows, torch.ones(7), percentile)
    np.testing.assert_allclose(found.numpy(), np.percentile(np.abs(rows.numpy()), percentile, axis=0), rtol=1e-12)


def test_scales_are_never_zero():
    """A channel that is silent in the sampled rows takes its deviation, a dead one 1."""
    rows = torch.zeros(300, 3, dtype=torch.float64)
    rows[:, 0] = torch.linspace(-2, 2, 300)
    rows[0, 1] = 50.0
    variance = torch.tensor([4 / 3, 2500 / 300, 0.0], dtype=torch.float64)
    scales = channel_scales(torch.eye(3, dtype=torch.float64)[None], rows, variance)
    assert scales[0].item() == pytest.approx(1.98, abs=0.01)
    assert scales[1].item() == pytest.approx((2500 / 300) ** 0.5, rel=1e-12)
    assert scales[2].item() == 1.0


@pytest.mark.parametrize("quantizer", ["uniform-token-max", "lloyd", "uniform"])
@pytest.mark.parametrize("transform", ["whiten", "metric"])
def test_a_channel_in_which_everything_cancels_does_not_spoil_the_others(transform, quantizer):
    """Two equal columns leave a direction of rounding alone, far smaller in float64 than in a float32 cache."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 16, generator=generator) * torch.logspace(-1, 1, 16)
    rows[:, 5] = rows[:, 4]
    moment = rows.double().T @ rows.double() / 2000
    eye = torch.eye(16, dtype=torch.float64)
    found = whitening(moment) if transform == "whiten" else loss_metric(moment, eye)
    encode = found.encode[None]
    variance = latent_variance(encode, moment)
    assert (variance == 0).sum() == 1
    codec = TransformCodec(
        encode,
        found.decode[None],
        channel_scales(encode, rows, variance),
        torch.full((16,), 8),
        variance,
        quantizer=quantizer,
    ).to("cpu")
    assert ((codec.reconstruct(rows) - rows).square().sum() / rows.square().sum()) < 1e-4
