"""The distortion theorem against the true attention output.

Two oracles, both of which only run attention with noise added: uniform noise by Monte-Carlo, and noise of +-sigma
(symmetric, bounded, kappa = 1) whose finitely many sign patterns are all visited, so expectations are exact.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from aatc_cli.core.distortion import (
    coupled_key_distortion,
    coupled_value_distortion,
    key_distortion,
    remainder_bound,
    softmax_remainder_bound,
    value_distortion,
)

UNIFORM_KAPPA = 3**0.5
SAMPLES = 200_000


@dataclass
class Head:
    q: Tensor  # [D]
    K: Tensor  # [T, D]
    V: Tensor  # [T, Dv]
    W_O: Tensor  # [Dv, M]
    scaling: float

    def output(self, dk: Tensor | float = 0.0, dv: Tensor | float = 0.0) -> Tensor:
        weights = torch.softmax(self.scaling * ((self.K + dk) @ self.q), dim=-1)  # [..., T]
        return ((weights[..., None] * (self.V + dv)).sum(dim=-2)) @ self.W_O

    def errors(self, dk: Tensor | float = 0.0, dv: Tensor | float = 0.0) -> Tensor:
        return (self.output(dk, dv) - self.output()).square().sum(dim=-1)

    def key(self, noise: Tensor) -> Tensor:
        return key_distortion(self.q, self.K, self.V, self.W_O, noise, self.scaling)

    def value(self, noise: Tensor) -> Tensor:
        return value_distortion(self.q, self.K, noise, self.W_O, self.scaling)

    def bound(self, sigma_k: float, sigma_v: float, kappa: float) -> Tensor:
        return remainder_bound(self.q, self.K, self.V, self.W_O, sigma_k, sigma_v, kappa, self.scaling)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def make_head(seed: int, tokens: int, dim: int, width: int = 5, sharpness: float = 1.0) -> Head:
    gen = rng(seed)
    return Head(
        q=sharpness * normal(gen, dim),
        K=normal(gen, tokens, dim),
        V=normal(gen, tokens, dim) + 1.0,  # a mean, so that v W_O and v W_O - o differ in size
        W_O=normal(gen, dim, width),
        scaling=dim**-0.5,
    )


def variances(gen: torch.Generator, sigma: float, *shape: int) -> Tensor:
    """Unequal variances in [0.1, 1] sigma^2 with the maximum attained."""
    scale = 0.1 + 0.9 * torch.rand(*shape, generator=gen, dtype=torch.float64)
    return sigma**2 * scale / scale.max()


def uniform(gen: torch.Generator, noise: Tensor, samples: int = SAMPLES) -> Tensor:
    draw = 2 * torch.rand(samples, *noise.shape, generator=gen, dtype=torch.float64) - 1
    return draw * (3 * noise).sqrt()


def all_signs(noise: Tensor) -> Tensor:
    """Every pattern of +-sqrt(noise): [2^n, *noise.shape]."""
    n = noise.numel()
    bits = (torch.arange(2**n)[:, None] >> torch.arange(n)) & 1
    return (2.0 * bits.double() - 1).reshape(-1, *noise.shape) * noise.sqrt()


def mean_and_stderr(x: Tensor) -> tuple[float, float]:
    return x.mean().item(), (x.std() / x.numel() ** 0.5).item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_key_distortion_matches_monte_carlo_and_its_mutants_do_not(seed: int):
    head, gen = make_head(seed, tokens=6, dim=4), rng(100 + seed)
    sigma = 2e-4
    # the channel that the query reads most is the noisiest, so that ignoring which channel is noisy must show
    tilt = torch.where(head.q.abs() == head.q.abs().max(), 1.0, 0.2).double()
    noise = variances(gen, sigma, 6, 4) * tilt
    measured, stderr = mean_and_stderr(head.errors(dk=uniform(gen, noise)))
    predicted, bound = head.key(noise).item(), head.bound(sigma, 0.0, UNIFORM_KAPPA).item()

    slack = 4 * stderr + bound
    assert slack < 0.05 * predicted  # otherwise the next line says little
    assert abs(measured - predicted) <= slack

    a = torch.softmax(head.scaling * head.K @ head.q, dim=0)
    values = head.V @ head.W_O
    residual = (values - head.output()).square().sum(dim=1)
    query = head.scaling * head.q
    mutants = {
        "query not squared": (a**2 * residual) @ noise @ query.abs(),
        "values not centered": (a**2 * values.square().sum(dim=1)) @ noise @ query**2,
        "weights not squared": (a * residual) @ noise @ query**2,
        "logits not scaled": (a**2 * residual) @ noise @ head.q**2,
        "noise averaged over channels": (a**2 * residual) @ noise.mean(dim=1) * (query**2).sum(),
    }
    for name, mutant in mutants.items():
        assert abs(measured - mutant.item()) > slack, name


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 30.0])
def test_value_distortion_is_exact_at_any_noise(sigma: float):
    head, gen = make_head(3, tokens=4, dim=3), rng(103)
    noise = variances(gen, sigma, 4, 3)
    exact = head.errors(dv=all_signs(noise)).mean()
    torch.testing.assert_close(head.value(noise), exact, rtol=1e-9, atol=0.0)

    measured, stderr = mean_and_stderr(head.errors(dv=uniform(gen, noise)))
    assert stderr < 0.01 * exact
    assert abs(measured - head.value(noise).item()) <= 4 * stderr


@pytest.mark.parametrize("sigma_v", [0.1, 3.0])
@pytest.mark.parametrize("sigma_k", [0.01, 0.3, 1.0, 4.0])
def test_joint_noise_stays_inside_the_bound_monte_carlo(sigma_k: float, sigma_v: float):
    head, gen = make_head(4, tokens=6, dim=4), rng(104)
    noise_k, noise_v = variances(gen, sigma_k, 6, 4), variances(gen, sigma_v, 6, 4)
    errors = head.errors(uniform(gen, noise_k, 100_000), uniform(gen, noise_v, 100_000))
    measured, stderr = mean_and_stderr(errors)
    predicted = (head.key(noise_k) + head.value(noise_v)).item()
    assert abs(measured - predicted) <= head.bound(sigma_k, sigma_v, UNIFORM_KAPPA).item() + 4 * stderr


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 5.0])
def test_bound_holds_exactly_and_is_not_vacuous(sharpness: float):
    """Exact remainders over a grid from negligible to overwhelming noise, for many random heads."""
    fullest, visible = 0.0, 0.0
    for seed in range(8):
        head = make_head(seed, tokens=3, dim=2, sharpness=sharpness)
        unit_k, unit_v = all_signs(torch.ones(3, 2).double()), all_signs(torch.ones(3, 2).double())
        for sigma_k in (0.01, 0.1, 0.5, 2.0, 10.0):
            for sigma_v in (0.0, 0.1, 2.0):
                ones = torch.ones(3, 2, dtype=torch.float64)
                exact = head.errors(sigma_k * unit_k[:, None], sigma_v * unit_v[None]).mean()
                predicted = head.key(sigma_k**2 * ones) + head.value(sigma_v**2 * ones)
                remainder, bound = (exact - predicted).abs(), head.bound(sigma_k, sigma_v, kappa=1.0)
                assert remainder <= bound * (1 + 1e-9)
                fullest = max(fullest, (remainder / bound).item())
                visible = max(visible, (remainder / predicted).item())
    assert fullest > 0.2
    assert visible > 0.3


@pytest.mark.parametrize("sigma", [1e-3, 1e-2, 0.1, 1.0, 10.0])
def test_bound_is_never_above_the_papers_terms(sigma: float):
    """The numbers printed in the proof, summed literally; for A0 > 1 its crude estimates."""
    for seed in range(20):
        head = make_head(seed, tokens=7, dim=4, sharpness=0.5 + seed / 10)
        query = head.scaling * head.q
        logit_variance = (query.square().sum() * sigma**2).item()
        A0 = (UNIFORM_KAPPA * query.abs().sum() * sigma).item()
        D_o = (head.V @ head.W_O - head.output()).square().sum(dim=1).max().item()
        value_power = (head.W_O.square().sum() * sigma**2).item()
        if A0 <= 1:
            r_key = (4 + 14 + 28 * A0 + 49 * A0**2) * D_o * A0**4
            c_sum = 8 * A0**3 + 36 * A0**4 + 98 * A0**6
            r_both = (2 * (logit_variance + 7 * A0**3) + 2 * logit_variance + c_sum) * value_power
        else:
            r_key = (4 + A0**2) * D_o
            r_both = (2 * 2 + 4) * value_power
        assert 0 < head.bound(sigma, sigma, UNIFORM_KAPPA).item() <= (r_key + r_both) * (1 + 1e-12)


def test_remainder_shrinks_like_the_noise_variance():
    """(D - D_K) / D_K = O(sigma^2): halving sigma divides it by four, exactly measured."""
    head = make_head(5, tokens=4, dim=3)
    unit = all_signs(torch.ones(4, 3, dtype=torch.float64))

    def relative(sigma: float) -> float:
        predicted = head.key(torch.full((4, 3), sigma**2, dtype=torch.float64))
        return ((head.errors(dk=sigma * unit).mean() - predicted) / predicted).item()

    steps = [relative(sigma) for sigma in (0.04, 0.02, 0.01)]
    assert abs(steps[-1]) > 1e-6  # far above rounding
    for coarse, fine in itertools.pairwise(steps):
        assert 3.9 < coarse / fine < 4.1


def softmax_rest(logits: Tensor, move: Tensor) -> Tensor:
    """r: the softmax response past second order, from a generic second directional derivative."""
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def response(t: Tensor) -> Tensor:
        return torch.softmax(logits + t * move, dim=0)

    def slope(t: Tensor) -> Tensor:
        return torch.func.jvp(response, (t,), (one,))[1]

    first, second = torch.func.jvp(slope, (zero,), (one,))
    return response(one) - response(zero) - first - second / 2


def test_softmax_tail_lemma():
    gen, fullest = rng(6), 0.0
    for trial in range(200):
        A0 = 10.0 ** (torch.rand((), generator=gen).item() * 3 - 2)  # 0.01 .. 10
        tokens = 2 + trial % 9
        move = 2 * torch.rand(tokens, generator=gen, dtype=torch.float64) - 1
        move = A0 * (move.sign() if trial % 2 else move / move.abs().max())  # half of them at the corners
        rest = softmax_rest(2 * normal(gen, tokens), move).abs()
        assert rest.max() <= 7 * A0**3
        assert rest.sum() <= 7 * A0**3
        bound = softmax_remainder_bound(torch.tensor(A0, dtype=torch.float64))
        assert rest.sum() <= bound + 1e-15
        fullest = max(fullest, (rest.sum() / bound).item())
    assert fullest > 0.1


def test_softmax_remainder_is_of_third_order():
    gen = rng(7)
    logits, move = normal(gen, 5), normal(gen, 5)
    coarse, fine = softmax_rest(logits, 0.02 * move), softmax_rest(logits, 0.01 * move)
    assert 7.5 < (coarse.norm() / fine.norm()).item() < 8.5


@dataclass
class Layer:
    """Three query heads on two key-value heads; keys and values decoded from latents, keys rotated per token."""

    queries: Tensor  # [J, D]
    key_decode: Tensor  # [C, H, D], zero outside a channel's own kv head
    value_decode: Tensor  # [C, H, D]
    latent_k: Tensor  # [T, C]
    latent_v: Tensor  # [T, C]
    W_O: Tensor  # [J, D, M]
    rotation: Tensor  # [T, D, D]
    kv_head: tuple[int, ...]
    scaling: float

    def heads(self, latent_k: Tensor, latent_v: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [..., J, T], projected values [..., J, T, M]) of all heads."""
        K = torch.einsum("...tc,chd,ted->...hte", latent_k, self.key_decode, self.rotation)[..., self.kv_head, :, :]
        V = torch.einsum("...tc,chd->...htd", latent_v, self.value_decode)[..., self.kv_head, :, :]
        logits = self.scaling * torch.einsum("...jtd,jd->...jt", K, self.queries)
        return torch.softmax(logits, dim=-1), torch.einsum("...jtd,jdm->...jtm", V, self.W_O)

    def error(self, dk: Tensor | float, dv: Tensor | float) -> Tensor:
        noisy = torch.einsum("...jt,...jtm->...m", *self.heads(self.latent_k + dk, self.latent_v + dv))
        exact = torch.einsum("...jt,...jtm->...m", *self.heads(self.latent_k, self.latent_v))
        return (noisy - exact).square().sum(dim=-1)

    def key_terms(self) -> tuple[Tensor, Tensor, Tensor]:
        weights, projected = self.heads(self.latent_k, self.latent_v)
        decode = self.key_decode[:, self.kv_head]  # [C, J, D]
        reads = self.scaling * torch.einsum("cjd,ted,je->jtc", decode, self.rotation, self.queries)
        residual = projected - torch.einsum("jt,jtm->jm", weights, projected)[:, None]
        return weights, reads, torch.einsum("jtm,ktm->tjk", residual, residual)

    def value_terms(self) -> tuple[Tensor, Tensor]:
        weights, _ = self.heads(self.latent_k, self.latent_v)
        readout = torch.einsum("cjd,jdm->jcm", self.value_decode[:, self.kv_head], self.W_O)
        return weights, torch.einsum("jcm,kcm->cjk", readout, readout)


@pytest.fixture
def layer() -> Layer:
    gen, tokens, channels, dim, heads = rng(8), 3, 4, 4, 3
    own = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=torch.float64)[:, :, None]  # [C, H, 1]
    angles = torch.arange(tokens).double()[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    rotation = torch.stack(
        [
            torch.block_diag(*(torch.stack([t.cos(), -t.sin(), t.sin(), t.cos()]).view(2, 2) for t in row))
            for row in angles
        ]
    )
    return Layer(
        queries=normal(gen, heads, dim) + 1.0,  # heads that look alike, as heads of one group do
        key_decode=own * normal(gen, channels, 2, dim),
        value_decode=own * normal(gen, channels, 2, dim),
        latent_k=normal(gen, tokens, channels),
        latent_v=normal(gen, tokens, channels),
        W_O=normal(gen, heads, dim, 6) + 0.5,
        rotation=rotation,
        kv_head=(0, 0, 1),
        scaling=0.5,
    )


def test_coupled_key_distortion_sees_heads_that_share_noise(layer: Layer):
    """Exact over all sign patterns; the relative error left must be second order in the noise."""
    gaps = []
    shape = variances(rng(9), 1.0, 3, 4)
    for sigma in (1e-2, 1e-3):
        noise = sigma**2 * shape
        exact = layer.error(all_signs(noise), 0.0).mean()
        coupled, diagonal = coupled_key_distortion(*layer.key_terms(), noise)
        gaps.append(abs(coupled / exact - 1).item())
        assert abs(diagonal / exact - 1) > 0.1
    assert gaps[0] < 1e-2
    assert 80 < gaps[0] / gaps[1] < 125


def test_coupled_key_distortion_matches_monte_carlo(layer: Layer):
    gen = rng(10)
    noise = variances(gen, 1e-3, 3, 4)
    measured, stderr = mean_and_stderr(layer.error(uniform(gen, noise), 0.0))
    coupled, diagonal = coupled_key_distortion(*layer.key_terms(), noise)
    assert stderr < 0.01 * measured
    assert abs(measured - coupled.item()) <= 4 * stderr
    assert abs(measured - diagonal.item()) > 20 * stderr


def test_coupled_value_distortion_is_exact(layer: Layer):
    noise = variances(rng(11), 5.0, 3, 4)
    exact = layer.error(0.0, all_signs(noise)).mean()
    coupled, diagonal = coupled_value_distortion(*layer.value_terms(), noise)
    torch.testing.assert_close(coupled, exact, rtol=1e-9, atol=0.0)
    assert abs(diagonal / exact - 1) > 0.1


def test_diagonal_is_the_theorem_head_by_head(layer: Layer):
    """Only the two heads of one group without rotation, where the theorem applies to each head as it stands."""
    flat = replace(layer, rotation=torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    noise = variances(rng(12), 0.1, 3, 4)
    K, V = (
        torch.einsum("tc,chd->htd", h, B)
        for h, B in ((flat.latent_k, flat.key_decode), (flat.latent_v, flat.value_decode))
    )
    key, value = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for j, h in enumerate(flat.kv_head):
        latent_query = flat.key_decode[:, h] @ flat.queries[j]
        key = key + key_distortion(latent_query, flat.latent_k, V[h], flat.W_O[j], noise, flat.scaling)
        readout = flat.value_decode[:, h] @ flat.W_O[j]
        value = value + value_distortion(flat.queries[j], K[h], noise, readout, flat.scaling)
    torch.testing.assert_close(coupled_key_distortion(*flat.key_terms(), noise)[1], key)
    torch.testing.assert_close(coupled_value_distortion(*flat.value_terms(), noise)[1], value)


def test_one_head_is_the_theorem():
    head = make_head(13, tokens=6, dim=4)
    noise = variances(rng(13), 0.1, 6, 4)
    weights = torch.softmax(head.scaling * head.K @ head.q, dim=0)[None]
    residual = (head.V @ head.W_O - head.output()).square().sum(dim=1)
    reads = (head.scaling * head.q).expand(1, 6, 4)
    gram = head.W_O.square().sum(dim=1)
    for got in coupled_key_distortion(weights, reads, residual[:, None, None], noise):
        torch.testing.assert_close(got, head.key(noise))
    for got in coupled_value_distortion(weights, gram[:, None, None], noise):
        torch.testing.assert_close(got, head.value(noise))
