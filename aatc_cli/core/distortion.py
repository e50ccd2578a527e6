"""Theorem "Attention Output Distortion" as code: D_K, D_V and a bound on R, for one decode step.

Dimension letters of this file: T cached tokens, D channels of a key head, Dv of a value head, M width of the output,
C latent channels of a site, J query heads. Everything keeps the dtype and device of its inputs, float64 included.

The paper's proof writes the logits as s = K q. Models compute s = scaling * K q (usually scaling = 1/sqrt(D)), which
is the same attention with the query scaling * q, so every q of the theorem, also the one inside A0, is scaling * q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _attention_weights(q: Tensor, K: Tensor, scaling: float) -> Tensor:
    """Exact attention weights a [T] of one query q [D] over the keys K [T, D]."""
    return torch.softmax(scaling * (K @ q), dim=0)


def _residuals(weights: Tensor, V: Tensor, W_O: Tensor) -> Tensor:
    """u_i = v_i W_O - o, shape [T, M]: what the output would change by if all attention went to token i."""
    projected = V @ W_O
    return projected - weights @ projected


def key_distortion(q: Tensor, K: Tensor, V: Tensor, W_O: Tensor, noise: Tensor, scaling: float) -> Tensor:
    """D_K: the output error caused by key noise, to second order in the noise.

    D_K = sum_{i,c} a_i^2 ||v_i W_O - o||^2 (scaling q_c)^2 E[dk_ic^2], in squared units of the attention output.
    The theorem has logits q^T k without a factor; with scaled logits the query enters as scaling * q.

    Args:
        q: query [D].
        K: exact keys [T, D].
        V: exact values [T, Dv].
        W_O: output projection of this head [Dv, M].
        noise: key noise variances E[dk_ic^2], [T, D]; zero where a token is kept exact.
        scaling: factor on the logits.

    Returns:
        A scalar. Source: Theorem "Attention Output Distortion", equation (EK-final) in the appendix.
    """
    weights = _attention_weights(q, K, scaling)
    residual = _residuals(weights, V, W_O).square().sum(dim=1)
    return (weights.square() * residual) @ (noise @ (scaling * q).square())


def value_distortion(q: Tensor, K: Tensor, noise_v: Tensor, W_O: Tensor, scaling: float) -> Tensor:
    """D_V: the output error caused by value noise alone; exact, because the output is linear in the values.

    D_V = sum_{i,c} a_i^2 E[dv_ic^2] ||(W_O)_c||^2, in squared units of the attention output.

    Args:
        q: query [D].
        K: exact keys [T, D].
        noise_v: value noise variances E[dv_ic^2], [T, Dv].
        W_O: output projection of this head [Dv, M].
        scaling: factor on the logits.

    Returns:
        A scalar. Source: Theorem "Attention Output Distortion", step 4 of its proof.
    """
    weights = _attention_weights(q, K, scaling)
    return weights.square() @ (noise_v @ W_O.square().sum(dim=1))


def softmax_remainder_bound(A0: Tensor) -> Tensor:
    """Bound on sum_i |r_i|, what is left of a softmax response past second order, elementwise in A0.

    No logit moves by more than A0. The third derivative along the way from the old logits to the new ones is at most
    40 A0^3 in l1 norm and Taylor's integral contributes 1/6: 20/3 A0^3 (the paper rounds it up to 7 A0^3). For a large
    A0 it is better to bound r as a difference: 2 for the two probability vectors, 2 A0 for the linear term and 2 A0^2
    for the quadratic one. Source: Lemma "Softmax tail bound".
    """
    return torch.minimum(20 / 3 * A0**3, 2 + 2 * A0 + 2 * A0**2)


def remainder_bound(
    q: Tensor, K: Tensor, V: Tensor, W_O: Tensor, sigma_k: float, sigma_v: float, kappa: float, scaling: float
) -> Tensor:
    """A number that |R| = |D - D_K - D_V| cannot exceed.

    It holds for noise that is independent, symmetric and has |dk_ic| <= kappa sigma_k. The theorem leaves an absolute
    constant open. Here every term of its proof keeps its own number, and a minimum with what holds for any noise
    replaces the case split at A0 = 1. With the scaled query, write S = ||q||^2 sigma_k^2 (bounds the variance of a
    logit), A0 = kappa ||q||_1 sigma_k (bounds the move of a logit), N = ||W_O||_F^2 sigma_v^2, rho =
    `softmax_remainder_bound`, D_o = max ||u_i||^2, and split the move of the weights as da = da1 + da2 + r (linear,
    quadratic, rest) with |da1_i| <= 2 a_i A0, |da2_i| <= 2 a_i A0^2 and sum |r_i| <= rho.

    *Both noises, R_2.* Each token's value noise carries at most N to the output, so steps 2(c) (the cross term, which
    the square contains twice) and 2(d) give at most N times sum_i |E[2 a_i da_i]| + sum_i E[da_i^2]:

    - 2 a_i da_i: da1 has mean zero; da2 has mean at most a_i S, half the difference of two numbers in [0, 2 S], times
      a_i; the rest costs a_max rho. Together 2 (S sum a^2 + a_max rho).
    - da_i^2: E[da1^2] <= 2 a_i^2 S; da1 da2 is odd in the noise and averages out; 2 da1 r costs 4 A0 a_max rho; and
      (da2 + r)^2, by the triangle inequality in l2 over the tokens, (2 A0^2 sqrt(sum a^2) + rho)^2.

    For any noise 2 a_i da_i + da_i^2 = (a_i + da_i)^2 - a_i^2, whose positive parts sum to at most 1 and negative
    parts too, so |R_2| never exceeds N.

    *Key noise alone, R_K.* Step 3: E_K = E1 + E2 + E3 with root mean squares at most e1 = sqrt(S sum a_i^2 ||u_i||^2),
    e2 = 2 A0^2 sum a_i ||u_i|| and e3 = rho sqrt(D_o). E1 E2 is odd and averages out, E||E1||^2 is D_K, and the rest
    is at most e2^2 + 2 e1 e3 + 2 e2 e3 + e3^2. With e1 <= A0 sqrt(D_o), e2 <= 2 A0^2 sqrt(D_o) and rho <= 7 A0^3 this
    is the paper's (4 + 14 + 28 A0 + 49 A0^2) D_o A0^4. For any noise, E_K is the average of the u_i under the new
    weights (their average under the old ones is zero), so E||E_K||^2 is in [0, D_o]; D_K is in [0, e1^2]; two such
    numbers differ by at most max(D_o, e1^2).

    Args:
        q: query [D].
        K: exact keys [T, D].
        V: exact values [T, Dv].
        W_O: output projection of this head [Dv, M].
        sigma_k: root of the largest key noise variance.
        sigma_v: root of the largest value noise variance.
        kappa: largest key error in units of sigma_k, at least 1; sqrt(3) for uniform noise.
        scaling: factor on the logits.

    Returns:
        A scalar in squared units of the attention output. Source: proof of Theorem "Attention Output Distortion".
    """
    query = scaling * q
    weights = _attention_weights(q, K, scaling)
    squares, largest = weights.square().sum(), weights.max()
    lengths = _residuals(weights, V, W_O).norm(dim=1)  # [T]
    logit_variance = query.square().sum() * sigma_k**2
    A0 = kappa * query.abs().sum() * sigma_k
    rho = softmax_remainder_bound(A0)

    cross = 2 * (logit_variance * squares + largest * rho)
    square = 2 * logit_variance * squares + 4 * A0 * largest * rho + (2 * A0**2 * squares.sqrt() + rho) ** 2
    both = W_O.square().sum() * sigma_v**2 * (cross + square).clamp(max=1)

    e1 = (logit_variance * (weights * lengths).square().sum()).sqrt()
    e2 = 2 * A0**2 * (weights @ lengths)
    e3 = rho * lengths.max()
    key = torch.minimum(e2**2 + 2 * e1 * e3 + 2 * e2 * e3 + e3**2, torch.maximum(lengths.max(), e1) ** 2)
    return both + key


def coupled_key_distortion(
    weights: Tensor, queries: Tensor, residual_gram: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """D_K of J heads that read the same cached key noise and add up in the output.

    The theorem has one head. Where several query heads share a latent key, their errors share its noise and add before
    the norm is taken: to second order D_K = sum_{i,c} E[dh_ic^2] ||sum_j a_ji queries_jic u_ji||^2. Expanding the norm
    leaves only inner products of residuals, so nothing of shape [T, C, M] is formed; memory is a few times J*T*C.

    Args:
        weights: exact attention weights of each head [J, T].
        queries: effective latent queries [J, T, C]: the logit of head j at token i moves by sum_c queries[j, i, c]
            dh_ic. They include the logit scaling and, for keys stored before RoPE, the rotation of token i; zero where
            head j does not read channel c.
        residual_gram: inner products u_ji . u_ki of the residuals u_ji = v_i^j W_O^j - o^j, [T, J, J].
        noise: latent noise variances E[dh_ic^2], [T, C].

    Returns:
        (coupled, diagonal), two scalars: the sum over all pairs of heads, and over j = k only, which is the theorem
        applied to each head by itself.
    """
    assert noise.shape == queries.shape[1:]
    reads = weights[:, :, None] * queries  # [J, T, C]
    coupled = diagonal = noise.new_zeros(())
    for j, read in enumerate(reads):
        weighted = noise * read  # [T, C]
        mixed = torch.einsum("tk,ktc->tc", residual_gram[:, j], reads)
        coupled = coupled + (weighted * mixed).sum()
        diagonal = diagonal + residual_gram[:, j, j] @ (weighted * read).sum(dim=1)
    return coupled, diagonal


def coupled_value_distortion(weights: Tensor, readout_gram: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """D_V of J heads that read the same cached value noise and add up in the output; exact.

    D_V = sum_{i,c} E[dh_ic^2] ||sum_j a_ji r_jc||^2 with r_jc [M] the row by which latent channel c reaches the output
    through head j: the c-th decoding row, restricted to the key-value head that j reads, times W_O^j. The token sum is
    taken first, so memory stays near J*(T + C).

    Args:
        weights: exact attention weights of each head [J, T].
        readout_gram: inner products r_jc . r_kc, [C, J, J].
        noise: latent noise variances E[dh_ic^2], [T, C].

    Returns:
        (coupled, diagonal), two scalars: the sum over all pairs of heads, and over j = k only, which is the theorem
        applied to each head by itself.
    """
    assert noise.shape == (weights.shape[1], readout_gram.shape[0])
    coupled = diagonal = noise.new_zeros(())
    for j, weight in enumerate(weights):
        shared = (weight * weights) @ noise  # [J, C], noise that heads j and k both read
        coupled = coupled + (shared * readout_gram[:, j].T).sum()
        diagonal = diagonal + shared[j] @ readout_gram[:, j, j]
    return coupled, diagonal
