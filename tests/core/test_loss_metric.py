"""The loss-metric transform by its defining equations and against competing transforms; Fisher weights by loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.core.transform import GroupTransform, loss_metric
from aatc_cli.core.weights import fisher_weights, latent_variance

SIZE, DAMPING = 7, 1e-4


def random_form(seed: int, size: int = SIZE, rank: int | None = None) -> torch.Tensor:
    """A positive matrix with eigenvalues over several decades, of ``rank`` if given."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(rank or 2 * size, size)) * np.exp2(rng.normal(0, 2, size))
    return torch.from_numpy(rows.T @ rows / rows.shape[0])


def damped(fisher: torch.Tensor) -> torch.Tensor:
    return fisher + DAMPING * fisher.diagonal().mean() * torch.eye(fisher.shape[0], dtype=torch.float64)


def close_to(found: torch.Tensor, expected: torch.Tensor, digits: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=digits * float(expected.abs().max()))


def check(found: GroupTransform, moment: torch.Tensor, fisher: torch.Tensor) -> None:
    eye = torch.eye(moment.shape[0], dtype=torch.float64)
    close_to(found.encode @ found.decode, eye)
    close_to(found.decode @ found.encode, eye)
    close_to(found.decode @ damped(fisher) @ found.decode.T, eye)
    close_to(found.encode.T @ moment @ found.encode, torch.diag(found.singular))
    assert (found.singular.diff() <= 0).all()
    assert (found.singular >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_metric_becomes_the_identity_and_channels_uncorrelated(seed):
    moment, fisher = random_form(seed), random_form(seed + 100)
    found = loss_metric(moment, fisher)
    check(found, moment, fisher)
    # independent: e are the eigenvalues of Sigma M, which has no root in it
    expected = np.sort(np.linalg.eigvals((moment @ damped(fisher)).numpy()).real)[::-1]
    np.testing.assert_allclose(found.singular.numpy(), expected, rtol=1e-8)


def test_squared_error_of_the_latents_is_the_loss():
    moment, fisher = random_form(1), random_form(2)
    found = loss_metric(moment, fisher)
    noise = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = torch.einsum("ni,ij,nj->n", noise, damped(fisher), noise)
    torch.testing.assert_close((noise @ found.encode).square().sum(1), loss, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_the_identity_metric_gives_principal_components(scale):
    moment = random_form(3)
    found = loss_metric(moment, scale * torch.eye(SIZE, dtype=torch.float64))
    values, vectors = np.linalg.eigh(moment.numpy())
    price = scale * (1 + DAMPING)
    np.testing.assert_allclose(found.singular.numpy(), values[::-1] * price, rtol=1e-7)
    for column, vector in enumerate(vectors[:, ::-1].T):
        direction = found.encode[:, column].numpy() / np.sqrt(price)
        assert abs(direction @ vector) == pytest.approx(1.0, abs=1e-8)


def test_scaling_either_matrix_scales_the_energies_alone():
    moment, fisher = random_form(4), random_form(5)
    one, other = loss_metric(moment, fisher), loss_metric(9 * moment, 4 * fisher)
    close_to(other.singular, 36 * one.singular)
    close_to(other.encode, 2 * one.encode)
    close_to(other.decode, one.decode / 2)


def test_signs_are_canonical():
    """Encode is L U with the largest component of every column of U positive, and L the Cholesky factor of M."""
    moment, fisher = random_form(6), random_form(7)
    found = loss_metric(moment, fisher)
    basis = torch.from_numpy(np.linalg.inv(np.linalg.cholesky(damped(fisher).numpy()))) @ found.encode
    close_to(basis.T @ basis, torch.eye(SIZE, dtype=torch.float64))
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_singular_metric_is_damped(rank):
    moment, fisher = random_form(8), random_form(9, rank=rank)
    found = loss_metric(moment, fisher)
    # a condition of 1e4 costs as many digits
    check(found, moment, fisher)
    assert torch.linalg.matrix_rank(fisher) == rank
    assert (found.singular > 0).all()


@pytest.mark.parametrize("fisher", [torch.zeros(SIZE, SIZE), -1e-20 * torch.eye(SIZE)], ids=["zero", "rounding"])
def test_no_metric_at_all_stays_finite(fisher):
    found = loss_metric(random_form(10), fisher)
    for part in (found.encode, found.decode, found.singular):
        assert torch.isfinite(part).all()
    close_to(found.encode @ found.decode, torch.eye(SIZE, dtype=torch.float64))


def test_a_singular_moment_has_zero_energies():
    moment, fisher = random_form(11, rank=3), random_form(12)
    found = loss_metric(moment, fisher)
    check(found, moment, fisher)
    assert int((found.singular > 1e-12 * found.singular[0]).sum()) == 3


@pytest.mark.parametrize("seed", range(3))
def test_no_other_transform_codes_better_at_high_rate(seed):
    """The loss at many bits is the geometric mean of variance times price of noise; 200 others, near and far."""
    moment, fisher = random_form(seed + 20), random_form(seed + 40)
    found, metric = loss_metric(moment, fisher), damped(fisher)

    def log_loss(encode: torch.Tensor) -> float:
        decode = torch.linalg.inv(encode)
        variance = (encode.T @ moment @ encode).diagonal()
        return float((variance * (decode @ metric @ decode.T).diagonal()).log().sum())

    ours = log_loss(found.encode)
    assert ours == pytest.approx(float(found.singular.log().sum()), abs=1e-6)
    # no transform at all is below |Sigma M| (Hadamard, twice), and ours reaches it
    assert ours == pytest.approx(float(torch.logdet(moment) + torch.logdet(metric)), abs=1e-6)
    gen = torch.Generator().manual_seed(seed)
    others = []
    for step in range(200):
        mixing = torch.randn(SIZE, SIZE, generator=gen, dtype=torch.float64)
        near = found.encode @ (torch.eye(SIZE, dtype=torch.float64) + 10 ** (-step % 5 - 1.0) * mixing)
        others.append(log_loss(mixing if step % 2 else near))
    assert min(others) > ours - 1e-6
    assert max(others) > ours + 1
    # and the measure does notice the paper's choice: principal components regardless of the metric
    assert log_loss(torch.linalg.eigh(moment).eigenvectors) > ours + 0.1


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_fisher_weights_by_explicit_loops(groups):
    size, rng = 6 // groups, np.random.default_rng(0)
    decode, fisher = torch.from_numpy(rng.normal(size=(groups, size, size))), random_form(13, size=6)
    found = fisher_weights(decode, fisher)
    expected = []
    for g in range(groups):
        for c in range(size):
            row = decode[g, c]
            terms = [row[i] * fisher[g * size + i, g * size + j] * row[j] for i in range(size) for j in range(size)]
            expected.append(float(sum(terms)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert found.shape == (6,)


def test_weights_and_variances_of_the_metric_transform():
    """In its own coordinates noise costs 1 in every channel, less what damping pretends, and variances are e."""
    moment, fisher = random_form(14), random_form(15)
    found = loss_metric(moment, fisher)
    added = damped(fisher) - fisher
    expected = 1 - (found.decode @ added @ found.decode.T).diagonal()
    torch.testing.assert_close(fisher_weights(found.decode[None], fisher), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(latent_variance(found.encode[None], moment), found.singular, rtol=1e-8, atol=0)
